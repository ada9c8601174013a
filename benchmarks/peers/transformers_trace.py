"""The trace on transformers' generate: static batches of `concurrency` prompts, padded on the left.

A batch runs until its longest request is done; only the tokens that were asked for are counted.
"""

from __future__ import annotations

import time

import torch
from common import load_trace_module, parse_arguments, report
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    args = parse_arguments(__doc__)
    trace_module = load_trace_module()
    trace = trace_module.make_trace(args.n, args.seed)
    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    for concurrency in args.concurrency:
        items = trace_module.items_for(trace, concurrency)
        prompt = 0
        start = time.perf_counter()
        for at in range(0, len(items), concurrency):
            batch = items[at : at + concurrency]
            inputs = tokenizer([item.prompt for item in batch], return_tensors="pt", padding=True)
            prompt += int(inputs.attention_mask.sum())
            longest = max(item.max_tokens for item in batch)
            with torch.inference_mode():
                model.generate(**inputs, do_sample=False, min_new_tokens=longest, max_new_tokens=longest)
        wall = time.perf_counter() - start
        output = sum(item.max_tokens for item in items)
        report("transformers", concurrency, len(items), wall, output, prompt)


if __name__ == "__main__":
    main()
