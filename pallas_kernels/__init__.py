"""Attention and matmul operations over a paged KV pool: one public function each, several implementations."""
