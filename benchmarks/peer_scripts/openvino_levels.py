"""The levels on OpenVINO GenAI's continuous batching pipeline, in its own process and without HTTP."""

from __future__ import annotations

import argparse
import time
from typing import Any

import openvino_genai as ov
from levels import Level, Record, new_record, parse_arguments, run_levels


def scheduler_config(prefix_caching: bool) -> ov.SchedulerConfig:
    config = ov.SchedulerConfig()
    config.cache_size = 2  # GiB
    config.max_num_seqs = 64
    config.max_num_batched_tokens = 512
    config.enable_prefix_caching = prefix_caching
    config.dynamic_split_fuse = True
    return config


def generation_config(num_tokens: int) -> ov.GenerationConfig:
    config = ov.GenerationConfig()
    config.apply_chat_template = False
    config.ignore_eos = True
    config.do_sample = False
    config.max_new_tokens = num_tokens
    return config


def properties(args: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = {"CACHE_DIR": args.cache_dir} if args.cache_dir else {}
    if args.float32:
        chosen |= {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
    return chosen


def main() -> None:
    args = parse_arguments(__doc__)
    pipeline = ov.ContinuousBatchingPipeline(
        str(args.model), scheduler_config(args.prefix_caching), "CPU", properties(args)
    )
    tokenizer = pipeline.get_tokenizer()
    next_id = 0

    def run(level: Level) -> list[Record]:
        nonlocal next_id
        waiting, running, records = list(level["items"]), {}, []
        while waiting or running:
            while waiting and len(running) < level["concurrency"]:
                item = waiting.pop(0)
                record, start = new_record(item, 0), time.perf_counter()
                handle = pipeline.add_request(next_id, item["prompt"], generation_config(item["max_tokens"]))
                records.append(record)
                running[next_id] = handle, record, start
                next_id += 1
            pipeline.step()
            for key, (handle, record, start) in list(running.items()):
                now = time.perf_counter() - start
                while handle.can_read():
                    count = sum(len(output.generated_ids) for output in handle.read().values())
                    record["output_tokens"] += count
                    if count:
                        record["arrivals"].append(now)
                if handle.get_status() != ov.GenerationStatus.RUNNING:
                    record["latency"] = now
                    del running[key]
        # Counted after the clock matters to no request; it is a thousandth of a level's time.
        for item, record in zip(level["items"], records, strict=True):
            record["prompt_tokens"] = tokenizer.encode(item["prompt"]).input_ids.shape[1]
        return records

    run_levels(args, run)


if __name__ == "__main__":
    main()
