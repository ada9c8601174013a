"""How smollm2.json was made: `python make.py MODEL.gguf`, with torch and transformers, on a CPU in float32.

The log-likelihoods of the items of tests/clients/lm_eval, from transformers' own reading of the same GGUF
file and its own tokenizer. It follows what lm-eval does with a pair: the continuation's tokens are what the
tokens of the whole text add to those of the context, and a whole text comes after the BOS token.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
ITEMS = HERE.parents[1] / "clients" / "lm_eval"


def read(name):
    return [json.loads(line) for line in (ITEMS / name).read_text("utf-8").splitlines()]


def main():
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    @torch.inference_mode()
    def score(context, continuation):
        """(log-likelihood of the continuation, whether greedy decoding gives it)"""
        ids = torch.tensor([context + continuation])
        logprobs = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(continuation)[:, None]).sum().item()
        return round(chosen, 5), logprobs.argmax(-1).tolist() == continuation

    facts = []
    for item in read("facts.jsonl"):
        context = encode(item["question"])
        wholes = [encode(f"{item['question']} {choice}") for choice in item["choices"]]
        assert all(whole[: len(context)] == context for whole in wholes)
        scores = [score(context, whole[len(context) :]) for whole in wholes]
        facts.append({"question": item["question"], "choices": scores})
    texts = [score([tokenizer.bos_token_id], encode(item["text"]))[0] for item in read("texts.jsonl")]
    golden = {
        "made_with": {name: version(name) for name in ("torch", "transformers")},
        "file": path.name,
        "facts": facts,
        "texts": texts,
    }
    lines = json.dumps(golden, ensure_ascii=False).replace('{"question"', '\n{"question"')
    (HERE / "smollm2.json").write_text(lines + "\n", "utf-8")


main()
