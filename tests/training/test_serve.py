"""Serving: the answers of one process from two, streamed or whole, honest refusals, and ends that lose nothing."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, GPTNeoXConfig, LlamaConfig

from tests.clusters.yard import wait_until
from tests.training.forks import Run
from tests.training.kitchen import Kitchen
from training.data import tokens
from training.data.chat import chat_of
from training.job import NodeJob
from training.process import JobError
from training.ranks import World
from training.serve.body import BadRequest, Reader
from training.serve.engine import Engine
from training.serve.model import open_model
from training.serve.server import Server
from training.serve.settings import Settings
from training.serve.weights import load

pytestmark = pytest.mark.torch

ALONE = World(0, 1, 0, 0, 1, torch.device("cpu"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = ["def answer(", "import", "for i in range(3):\n" * 60, "class A:\n    x = 1\n", "你好", "return"]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def export(folder: Path, config: Any, shard: str = "1GB") -> Path:
    """Write a folder as export does: a small model of large random weights, so that its answers are long and varied."""
    tokenizer = tokens.train([Path(__file__).read_text()], 500)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>")])
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for value in made.parameters():
        if value.ndim == 1:
            torch.nn.init.normal_(value, std=0.3)
    made.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def generated(folder: Path) -> dict[str, str]:
    """Return what transformers' own generate answers to each prompt, 24 tokens."""
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = tokens.load(folder / "tokenizer.json", 512)
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        out = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        found[prompt] = tokenizer.decode(out[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one file."""
    return export(tmp_path_factory.mktemp("model"), LlamaConfig(**SMALL, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """The answers of one process, by prompt."""
    return generated(model)


def job(folder: Path, model: Path, **inputs: Path) -> Path:
    """Write a job that serves a model."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"spec": {"serve": {"max_new_tokens": 24}}, "output": str(folder / "out")}
    places = {name: str(path) for name, path in ({"export": model} | inputs).items()}
    (folder / "job.json").write_text(json.dumps(told | {"inputs": places}))
    return folder / "job.json"


@pytest.fixture(scope="module")
def kitchen() -> Iterator[Kitchen]:
    """Ranks that start in milliseconds."""
    kitchen = Kitchen()
    yield kitchen
    kitchen.close()


@contextmanager
def served(kitchen: Kitchen, job_file: Path, ranks: int) -> Iterator[tuple[Run, httpx.Client]]:
    """Start a server and a client of it."""
    running = kitchen.start(job_file, ranks)
    wait_until(lambda: running.say("serving") or running.say("error"), 60)
    (at,) = running.say("serving")
    with httpx.Client(base_url=f"http://127.0.0.1:{at['port']}", timeout=60, trust_env=False) as client:
        yield running, client


@dataclass
class Here:
    """A server in this process, whose engine can be looked into."""

    engine: Engine
    client: httpx.Client
    stop: threading.Event
    thread: threading.Thread


@pytest.fixture(scope="module")
def here(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return how to start a server in this process with other settings."""
    opened = NodeJob.read(job(tmp_path_factory.mktemp("job"), model))

    @contextmanager
    def start(**told: Any) -> Iterator[Here]:
        limits = replace(Settings.of({"CASTRA_LISTEN": "127.0.0.1:0"}), **{"slots": 3, "queue": 40} | told)
        opened_model = open_model(opened, limits, ALONE)
        engine, stop = Engine(opened_model, limits, ALONE), threading.Event()
        server = Server(engine, opened_model.reader, limits)
        threads = [
            threading.Thread(target=engine.run, args=(stop.is_set,)),
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}),
        ]
        for thread in threads:
            thread.start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            yield Here(engine, client, stop, threads[0])
        stop.set()
        threads[0].join()
        server.settle()
        threads[1].join()

    return start


@pytest.fixture(scope="module")
def alone(here: Callable[..., Any]) -> Iterator[Here]:
    """A server with common settings."""
    with here(body=20_000) as running:
        yield running


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, but the end."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_two_ranks_give_many_clients_the_answers_of_one_process(
    kitchen: Kitchen, model: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    with served(kitchen, job(tmp_path, model), ranks=2) as (running, client):
        assert client.get("/ping").status_code == 200

        def ask(prompt: str) -> str:
            return str(client.post("/invocations", json={"inputs": prompt}).json()["generated_text"])

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(ask, PROMPTS * 2))
        assert found == [expected[prompt] for prompt in PROMPTS * 2]
        with client.stream("POST", "/invocations", json={"inputs": PROMPTS[0], "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            pieces = events(response)
        assert "".join(one["token"]["text"] for one in pieces[:-1]) == expected[PROMPTS[0]]
        assert len(pieces) > 10
        running.kill(signal.SIGTERM)
        assert running.wait() == [0, 0]
        assert running.say("served") == [{"event": "served", "answers": 13}]


def test_a_lost_rank_ends_the_server_with_a_sentence(kitchen: Kitchen, model: Path, tmp_path: Path) -> None:
    with served(kitchen, job(tmp_path, model), ranks=2) as (running, client):
        body = {"inputs": "x", "parameters": {"max_new_tokens": 2000}, "stream": True}
        with client.stream("POST", "/invocations", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(running.pids[1], signal.SIGKILL)
            rest = list(lines)
        assert json.loads(rest[-4].removeprefix("data: "))["error"].startswith("the server ended before the answer did")
        assert running.wait() == [1, -signal.SIGKILL]
        (error,) = running.say("error")
        assert error["message"].startswith("rank 0 cannot go on with the other ranks (")
        assert "Traceback" not in running.log.read_text()


def test_completions_and_chats_have_openais_shape(alone: Here, expected: dict[str, str]) -> None:
    body = {"model": "any", "prompt": PROMPTS[:2], "temperature": 0, "n": 1, "frequency_penalty": 0}
    told = alone.client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in told["choices"]] == [expected[prompt] for prompt in PROMPTS[:2]]
    assert told["object"] == "text_completion"
    assert told["usage"]["completion_tokens"] == 48
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
    told = alone.client.post("/v1/chat/completions", json=chat).json()
    assert told["choices"][0]["message"]["role"] == "assistant"
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    same = alone.client.post("/invocations", json={"inputs": prompt, "parameters": {"max_new_tokens": 8}}).json()
    assert told["choices"][0]["message"]["content"] == same["generated_text"]
    with alone.client.stream("POST", "/invocations", json=chat | {"stream": True}) as response:
        pieces = events(response)
    said = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert said == same["generated_text"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_lines_are_answered_line_by_line(alone: Here, expected: dict[str, str]) -> None:
    lines = "\n".join(json.dumps({"inputs": prompt}) for prompt in PROMPTS[:3])
    response = alone.client.post("/invocations", content=lines, headers={"Content-Type": "application/jsonlines"})
    assert response.headers["content-type"] == "application/jsonlines"
    found = [json.loads(line)["generated_text"] for line in response.text.splitlines()]
    assert found == [expected[prompt] for prompt in PROMPTS[:3]]


def asked(here: Here, **parameters: Any) -> str:
    body = {"inputs": PROMPTS[0], "parameters": parameters}
    return str(here.client.post("/invocations", json=body).raise_for_status().json()["generated_text"])


def test_parameters_change_the_answer_as_they_say(alone: Here, expected: dict[str, str]) -> None:
    whole = expected[PROMPTS[0]]
    assert asked(alone, stop=[whole[5:8], "never said"]) == whole[: whole.index(whole[5:8])]
    assert asked(alone, max_new_tokens=24, do_sample=True, top_k=1) == whole
    assert asked(alone, temperature=2.0, seed=7) == asked(alone, temperature=2.0, seed=7)
    assert asked(alone, temperature=2.0, seed=7) != asked(alone, temperature=2.0, seed=8)
    assert asked(alone, return_full_text=True) == PROMPTS[0] + whole


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"{", 400, "the body is no JSON: it cannot be read at character 1"),
        (b"[1]", 400, "the body is no JSON object; send inputs, prompt or messages"),
        (b"\xff", 400, "the body is no JSON"),
        (b'{"inputs": "\\ud800"}', 400, "inputs holds half a character (a lone surrogate); take it out"),
        ({}, 400, "the body must have exactly one of inputs, prompt and messages"),
        ({"inputs": 7}, 400, "inputs must be a text, or a list of texts"),
        ({"inputs": ""}, 400, "the prompt has 0 tokens, and 1 to 2047 can be read; change it"),
        ({"inputs": "x", "parameters": {"max_new_tokens": "9"}}, 400, "max_new_tokens must be a whole number from 1"),
        ({"inputs": "x", "parameters": {"max_new_tokens": 2048}}, 400, "2048 new tokens after 1 are more than the"),
        ({"inputs": "x", "parameters": {"best_of": 3}}, 400, "best_of is no parameter that this server knows"),
        ({"inputs": "x", "temperature": 1}, 400, "beside inputs stand parameters, an object, and stream; temp"),
        ({"inputs": ["x", "y"], "stream": True}, 400, "only one prompt can be streamed; send several requests"),
        ({"prompt": "x", "n": 2}, 400, "n is no parameter that this server knows"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p must be a number from 1e-09 to 1"),
        ({"prompt": "x", "stop": [""]}, 400, "stop must be a text, or a list of at most 16, none of them empty"),
        ({"messages": []}, 400, "messages: its messages are not a list of {role, content} with at least one turn"),
        ({"messages": [{"role": "user"}]}, 400, "messages: turn 1 (the user's) has no text"),
        ({"prompt": "x" * 30_000}, 413, "the body has 30014 bytes, and at most 20000 may be"),
    ],
)  # fmt: skip
def test_a_bad_body_is_told_in_one_sentence(alone: Here, body: Any, status: int, sentence: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = alone.client.post("/invocations", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert response.json()["error"].startswith(sentence)


NAMES = [
    "inputs",
    "prompt",
    "messages",
    "parameters",
    "stream",
    "stop",
    "seed",
    "top_k",
    "max_tokens",
    "role",
    "content",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
)


@settings(deadline=None, max_examples=100)
@given(body=JSON)
def test_any_body_is_understood_or_refused(model: Path, body: Any) -> None:
    tokenizer = tokens.load(model / "tokenizer.json", 512)
    reader = Reader(tokenizer, chat_of("tokenizer", tokenizer, model), 2048, 24)
    with suppress(BadRequest):
        assert all(0 < len(wish.ids) + wish.limit <= 2048 for wish in reader.read(json.loads(json.dumps(body))).wishes)


def test_a_wrong_address_or_kind_is_refused(alone: Here) -> None:
    assert alone.client.get("/").status_code == 404
    assert alone.client.post("/else", json={}).status_code == 404
    assert alone.client.post("/invocations", content=b"x", headers={"Content-Type": "text/csv"}).status_code == 415
    assert alone.client.post("/invocations", content=iter([b"x"])).status_code == 411
    assert alone.client.request("PUT", "/ping").status_code == 501


def test_when_the_queue_is_full_the_next_is_told_so(here: Callable[..., Any]) -> None:
    with here(slots=1, queue=2) as running:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 300}}
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: running.client.post("/invocations", json=body), range(8)))
        codes = [response.status_code for response in found]
        assert set(codes) == {200, 503}
        refused = next(response for response in found if response.status_code == 503)
        assert "requests wait already, and at most 2 may; ask later" in refused.json()["error"]


def test_who_hangs_up_frees_the_slot(here: Callable[..., Any]) -> None:
    with here(slots=1) as running:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 2000}}
        with running.client.stream("POST", "/invocations", json=body | {"stream": True}) as response:
            next(response.iter_lines())
        wait_until(lambda: running.engine.load == (0, 0), 20)
        with pytest.raises(httpx.ReadTimeout):
            running.client.post("/invocations", json=body, timeout=0.3)
        wait_until(lambda: running.engine.load == (0, 0), 20)
        assert running.engine.answered == 2


def test_a_request_that_takes_too_long_is_ended(here: Callable[..., Any]) -> None:
    with here(seconds=0.2) as running:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 2000}}
        response = running.client.post("/invocations", json=body)
        assert response.status_code == 504
        assert response.json()["error"] == "the answer took longer than a request may; ask for fewer tokens"


def test_what_was_asked_before_the_end_is_answered(here: Callable[..., Any], expected: dict[str, str]) -> None:
    with here(slots=1) as running:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 400}, "stream": True}
        with running.client.stream("POST", "/invocations", json=body) as response, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(running.client.post, "/invocations", json={"inputs": PROMPTS[1]})
            wait_until(lambda: running.engine.load == (1, 1), 20)
            running.stop.set()
            wait_until(lambda: not running.engine.open, 20)
            assert running.client.get("/ping").status_code == 503
            refused = running.client.post("/invocations", json={"inputs": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"].startswith("the server is about to end")
            assert events(response)[-1] == {"finish_reason": "length"}
            assert waiting.result().json()["generated_text"] == expected[PROMPTS[1]]


def test_a_file_of_requests_is_answered_in_order_across_a_kill(kitchen: Kitchen, tmp_path: Path) -> None:
    shape = GemmaConfig(**SMALL, head_dim=8, attention_bias=True, max_position_embeddings=2048)
    model = export(tmp_path / "model", shape, shard="40KB")
    assert len(list(model.glob("*.safetensors"))) > 2
    expected = generated(model)
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"inputs": prompt}) for prompt in PROMPTS * 8]
    prompts.write_text("\n".join([*lines, "{", json.dumps({"inputs": ""})]) + "\n")
    job_file = job(tmp_path, model, prompts=prompts)
    running = kitchen.start(job_file, 1, "training.serve.batch")
    wait_until(lambda: any(path.stat().st_size for path in (tmp_path / "out").glob(".answers.*.partial")), 60)
    running.kill(signal.SIGKILL)
    assert running.wait() == [-signal.SIGKILL]
    (partial,) = (tmp_path / "out").glob(".answers.*.partial")
    before = partial.read_bytes()
    partial.write_bytes(before + b'{"line": 99, "ans')
    running = kitchen.start(job_file, 2, "training.serve.batch")
    assert running.wait() == [0, 0], running.log.read_text()
    answers = (tmp_path / "out/answers.jsonl").read_bytes()
    assert answers.startswith(before[: before.rindex(b"\n") + 1])
    told = [json.loads(line) for line in answers.splitlines()]
    assert [one["line"] for one in told] == list(range(1, 51))
    assert [one["answer"]["generated_text"] for one in told[:-2]] == [expected[prompt] for prompt in PROMPTS * 8]
    assert [one["error"].split(",")[0] for one in told[-2:]] == ["the line is no JSON", "the prompt has 0 tokens"]
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert (result["answers"], result["errors"]) == (48, 2)


def test_what_cannot_be_served_is_told_in_one_sentence(model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"there is no exported model in .*; run export first"):
        load(tmp_path, ALONE)
    three = replace(ALONE, size=3)
    with pytest.raises(JobError, match=r"serve\.tp: 3 ranks do not divide the model's num_attention_heads, num_key"):
        load(model, three)
    GPTNeoXConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"serve\.tp: gpt_neox has no layers that we know how to cut"):
        load(tmp_path, replace(ALONE, size=2))
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(JobError, match=r"config\.json is no model that transformers knows"):
        load(tmp_path, ALONE)
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    tokens.train([Path(__file__).read_text()], 600).save(str(mixed / "tokenizer.json"))
    with pytest.raises(JobError, match="its tokenizer has 600 tokens and its model 512; put the tokenizer there"):
        open_model(NodeJob.read(job(tmp_path, mixed)), Settings.of({}), ALONE)
    for told, sentence in (
        ({"CASTRA_LISTEN": "8080"}, "CASTRA_LISTEN is '8080'; write it as host:port"),
        ({"CASTRA_SLOTS": "many"}, r"CASTRA_SLOTS is 'many'; write a number above 0, or leave it out \(8\)"),
    ):
        with pytest.raises(JobError, match=sentence):
            Settings.of(told)


def test_a_taken_address_is_told_in_one_sentence(alone: Here) -> None:
    taken = Settings.of({"CASTRA_LISTEN": f"127.0.0.1:{alone.client.base_url.port}"})
    with pytest.raises(JobError, match=r"cannot be listened at \(Address already in use\); free it, or name another"):
        Server(alone.engine, None, taken)  # type: ignore[arg-type]  # nothing is read before it listens


def test_windows_and_soft_caps_are_those_of_the_model(tmp_path: Path) -> None:
    shape = Gemma2Config(**SMALL, head_dim=8, sliding_window=8)
    assert shape.attn_logit_softcapping
    export(tmp_path, shape)
    limits = Settings.of({})
    opened = open_model(NodeJob.read(job(tmp_path / "job", tmp_path)), limits, ALONE)
    engine = Engine(opened, limits, ALONE)
    wishes = [opened.reader.read({"inputs": prompt}).wishes[0] for prompt in PROMPTS]
    answers = engine.submit(wishes)
    engine.run(lambda: True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for wish, answer in zip(wishes, answers, strict=True):
        out = reference.generate(torch.tensor([wish.ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        found = out[0, len(wish.ids) :].tolist()
        assert answer.tokens == (found[:-1] if found[-1] == 511 else found)
