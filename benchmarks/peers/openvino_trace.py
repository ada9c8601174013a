"""The trace on OpenVINO GenAI's continuous-batching pipeline, without HTTP and without prefix caching."""

from __future__ import annotations

import time

import openvino_genai as ov
from common import load_trace_module, parse_arguments, report


def scheduler_config() -> ov.SchedulerConfig:
    config = ov.SchedulerConfig()
    config.cache_size = 2  # GiB
    config.max_num_seqs = 64
    config.max_num_batched_tokens = 512
    config.enable_prefix_caching = False
    config.dynamic_split_fuse = True
    return config


def generation_config(num_tokens: int) -> ov.GenerationConfig:
    config = ov.GenerationConfig()
    config.apply_chat_template = False
    config.ignore_eos = True
    config.do_sample = False
    config.max_new_tokens = num_tokens
    return config


def main() -> None:
    args = parse_arguments(__doc__)
    trace_module = load_trace_module()
    trace = trace_module.make_trace(args.n, args.seed)
    pipeline = ov.ContinuousBatchingPipeline(str(args.model), scheduler_config(), "CPU")
    tokenizer = pipeline.get_tokenizer()
    prompt_tokens = [tokenizer.encode(item.prompt).input_ids.shape[1] for item in trace]
    request_id = 0
    for concurrency in args.concurrency:
        items = trace_module.items_for(trace, concurrency)
        waiting, running = list(items), {}
        start = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < concurrency:
                item = waiting.pop(0)
                config = generation_config(item.max_tokens)
                running[request_id] = pipeline.add_request(request_id, item.prompt, config)
                request_id += 1
            pipeline.step()
            for key, handle in list(running.items()):
                if handle.can_read():
                    handle.read()
                if handle.get_status() != ov.GenerationStatus.RUNNING:
                    del running[key]
        wall = time.perf_counter() - start
        output = sum(item.max_tokens for item in items)
        report("openvino-genai", concurrency, len(items), wall, output, sum(prompt_tokens[: len(items)]))


if __name__ == "__main__":
    main()
