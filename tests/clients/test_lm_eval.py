"""lm-eval's `local-completions`: scoring by log-likelihood, and generation.

With `tokenizer_backend=auto`, its default, it finds /tokenizer_info and /tokenize and needs no tokenizer
of its own. The numbers that must come out were made with transformers (tests/goldens/lm_eval/make.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import lm_eval
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients.served import Served

HERE = Path(__file__).parent / "lm_eval"
GOLDEN = json.loads((HERE.parents[1] / "goldens" / "lm_eval" / "smollm2.json").read_text("utf-8"))
MODEL = "smollm2-135m-instruct"


def arguments(served: Served, **more):
    return {"model": "tiny", "base_url": f"{served.base_url}/completions", **more}


def evaluate(served: Served, task: str, tmp_path: Path, limit: int | None = None, **more):
    """The results of one of the tasks of this folder, with the answer to each of its first `limit` items."""
    config = yaml.safe_load((HERE / f"{task}.yaml").read_text())
    config["dataset_kwargs"] = {
        "data_files": {"test": str(HERE / config["dataset_kwargs"]["data_files"]["test"])},
        "cache_dir": str(tmp_path),
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments(served, **{"model": MODEL, **more}),
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        verbosity="ERROR",
    )
    samples = sorted(results["samples"][config["task"]], key=lambda sample: sample["doc_id"])
    return results["results"][config["task"]], samples


def best(scores):
    return max(range(len(scores)), key=lambda i: scores[i])


@pytest.mark.real
@pytest.mark.parametrize(
    ("how", "items"),
    [
        ({"batch_size": 16}, len(GOLDEN["facts"])),
        ({"num_concurrent": 8}, 8),
        ({"tokenized_requests": False}, 8),
    ],
    ids=["batches", "concurrent", "as text"],
)
def test_multiple_choice_scores_as_transformers_does(real, tmp_path, how, items):
    scores, samples = evaluate(real, "facts", tmp_path, items, **how)
    goldens = GOLDEN["facts"][:items]
    for golden, sample in zip(goldens, samples, strict=True):
        assert sample["doc"]["question"] == golden["question"]
        found = [response[0] for response in sample["filtered_resps"]]
        expected = [score for score, _ in golden["choices"]]
        assert found == pytest.approx(expected, rel=1e-3), golden["question"]
        assert best(found) == best(expected)
        greedy = [response[1] for response in sample["filtered_resps"]]
        assert greedy == [is_greedy for _, is_greedy in golden["choices"]]
    answers = [sample["doc"]["answer"] for sample in samples]
    chosen = [best([score for score, _ in golden["choices"]]) for golden in goldens]
    accuracy = sum(map(int.__eq__, answers, chosen)) / items
    assert scores["acc,none"] == pytest.approx(accuracy)
    assert 0.5 < accuracy < 1
    assert [sent.path for sent in real.sent[:2]] == ["/tokenizer_info", "/tokenize"]
    asked = [sent.body for sent in real.sent if sent.path == "/v1/completions"]
    assert all(body["echo"] and body["logprobs"] == 1 and body["max_tokens"] == 1 for body in asked)
    assert isinstance(asked[0]["prompt"], str if "tokenized_requests" in how else list)


@pytest.mark.real
def test_the_likelihood_of_whole_texts_is_that_of_transformers(real, tmp_path):
    scores, samples = evaluate(real, "texts", tmp_path, batch_size=4)
    found = [sample["filtered_resps"][0] for sample in samples]
    assert found == pytest.approx(GOLDEN["texts"], rel=1e-3)
    num_bytes = sum(len(sample["doc"]["text"].encode()) for sample in samples)
    assert scores["bits_per_byte,none"] > 0
    assert scores["byte_perplexity,none"] == pytest.approx(2 ** scores["bits_per_byte,none"])
    assert scores["bits_per_byte,none"] == pytest.approx(
        -sum(GOLDEN["texts"]) / num_bytes / math.log(2), rel=1e-3
    )


def generate(model, *prompts):
    options = {"until": ["zzzz"], "max_gen_toks": 6}
    requests = [Instance("generate_until", {}, (prompt, options), i) for i, prompt in enumerate(prompts)]
    return model.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("how", [{"batch_size": 2}, {"num_concurrent": 2}, {"tokenizer_backend": "none"}])
def test_generation(tiny, how):
    texts = generate(LocalCompletionsAPI(**arguments(tiny, **how)), "Hello", "there")
    for prompt, text in zip(("Hello", "there"), texts, strict=True):
        asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        assert text == tiny.raw("/v1/completions", asked)["choices"][0]["text"]
    sent = tiny.sent[-1].body
    assert sent["stop"][0] == "zzzz"
    assert sent["seed"] == 1234
    assert ("/tokenizer_info" in [sent.path for sent in tiny.sent]) == ("tokenizer_backend" not in how)


def test_a_key_reaches_the_tokenizer_too(strict, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    model = LocalCompletionsAPI(**arguments(strict, auth_token="right"))
    assert model.tokenizer_backend == "remote"
    assert len(generate(model, "Hello")[0]) > 0
    assert all(sent.headers["authorization"] == "Bearer right" for sent in strict.sent)


def test_the_generated_token_after_the_scored_ones_counts_when_it_ends_the_text(tiny):
    """lm-eval drops the last log-probability as that of the generated token: it must be there, EOS or not."""
    eos = LocalCompletionsAPI(**arguments(tiny)).eot_token_id
    asked = {"prompt": [[40, 41, 42]], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    plain = tiny.raw("/v1/completions", asked)["choices"][0]
    ended = tiny.raw("/v1/completions", {**asked, "logit_bias": {str(eos): 100}})["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert len(ended["logprobs"]["token_logprobs"]) == len(plain["logprobs"]["token_logprobs"]) == 4
