"""The levels on transformers' generate: static batches of `concurrency` prompts, padded on the left.

A batch runs until its longest request is done; only the tokens that were asked for are counted. Nothing
streams, so there are no times of first tokens.
"""

from __future__ import annotations

import time

import torch
from levels import Level, Record, new_record, parse_arguments, run_levels
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    args = parse_arguments(__doc__)
    source = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()

    def run(level: Level) -> list[Record]:
        records = []
        for at in range(0, len(level["items"]), level["concurrency"]):
            batch = level["items"][at : at + level["concurrency"]]
            start = time.perf_counter()
            inputs = tokenizer([item["prompt"] for item in batch], return_tensors="pt", padding=True)
            longest = max(item["max_tokens"] for item in batch)
            with torch.inference_mode():
                model.generate(**inputs, do_sample=False, min_new_tokens=longest, max_new_tokens=longest)
            took = time.perf_counter() - start
            for item, mask in zip(batch, inputs.attention_mask, strict=True):
                record = new_record(item, int(mask.sum()))
                record |= {"output_tokens": item["max_tokens"], "latency": took}
                records.append(record)
        return records

    run_levels(args, run)


if __name__ == "__main__":
    main()
