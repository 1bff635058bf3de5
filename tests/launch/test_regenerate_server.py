"""Answers from a real HTTP server that speaks the protocol: concurrent, retried, resumed, exact where it says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.data.dataset import Dataset
from launch import prepare, regenerate
from tests.builders.completion_server import END_ID, CompletionServer
from tests.builders.supervised import read_supervised
from tests.builders.tiny_chat_model import END, save_chat_model


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(server: CompletionServer, prompts: Path, *options: str) -> int:
    command = ["--server", server.url, "--server-model", "target", "--prompts", str(prompts)]
    return regenerate.main([*command, "--out", str(prompts.parent / "out.jsonl"), "--max-new-tokens", "40", *options])


def read_out(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def say(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_the_rows_come_in_the_order_of_the_prompts_from_requests_at_the_same_time(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path, [{"prompt": f"question {number}"} for number in range(12)])
    with CompletionServer(meet=4) as server:  # it answers none before four are there
        assert run(server, prompts, "--concurrency", "4") == 0
    assert [row["messages"] for row in read_out(tmp_path)] == [
        [say("user", f"question {number}"), say("assistant", f"re: question {number}")] for number in range(12)
    ]
    request = next(request for request in server.requests if request["messages"][0]["content"] == "question 3")
    assert request == {
        "model": "target",
        "messages": [say("user", "question 3")],
        "max_tokens": 40,
        "return_token_ids": True,
        "temperature": 0,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize("ids", ["vllm", "sglang"])
def test_exact_ids_are_kept_where_the_server_returns_them(tmp_path: Path, ids: Any) -> None:
    with CompletionServer(ids) as server:
        assert run(server, write_rows(tmp_path, [{"prompt": "ab"}, {"turns": ["a", "b"]}])) == 0
    first, second = read_out(tmp_path)
    assert (first["prompt_ids"], first["answer_ids"]) == ([*b"ab"], [*b"re: ab", END_ID])
    assert second["answers"] == [
        {"prompt_ids": [*b"a"], "answer_ids": [*b"re: a", END_ID]},
        {"prompt_ids": [*b"a|re: a|b"], "answer_ids": [*b"re: b", END_ID]},
    ]
    assert [message["content"] for message in second["messages"]] == ["a", "re: a", "b", "re: b"]


def test_a_request_that_fails_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with CompletionServer(failures=(503, 429, 0, 500)) as server:
        assert run(server, write_rows(tmp_path, [{"prompt": "a"}]), "--concurrency", "1") == 0
    assert read_out(tmp_path)[0]["messages"][-1]["content"] == "re: a"


def test_a_server_that_goes_on_failing_ends_it_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    prompts = write_rows(tmp_path, [{"prompt": f"{number}"} for number in range(6)])
    with CompletionServer() as server:
        server.max_answers = 3
        assert run(server, prompts, "--concurrency", "1") == 2
    assert f'error: {server.url}: 401 {{"error": "no more"}}\n' in capsys.readouterr().err
    partial = tmp_path / "out.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 3 and not (tmp_path / "out.jsonl").exists()
    with partial.open("a") as file:
        file.write('{"key": "cut by a k')
    with CompletionServer() as server:
        assert run(server, prompts) == 0
        assert server.prompts() == ["3", "4", "5"]
        assert [row["messages"][0]["content"] for row in read_out(tmp_path)] == ["0", "1", "2", "3", "4", "5"]
        more = write_rows(tmp_path, [{"prompt": "7"}, {"prompt": "2"}])
        assert run(server, more) == 0
        assert server.prompts() == ["3", "4", "5", "7"]  # what the file holds already is not asked for
        assert run(server, more, "--request-set", "temperature=1") == 0
        assert len(server.requests) == 6  # another setting is another question
    assert [row["messages"][0]["content"] for row in read_out(tmp_path)] == ["7", "2"]


def test_no_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer() as server:
        pass
    assert run(server, write_rows(tmp_path, [{"prompt": "a"}]), "--retries", "0") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {server.url}: no answer in 1 attempts, the last: ") and "refused" in error


def test_a_refused_prompt_is_counted_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CompletionServer() as server:
        assert run(server, write_rows(tmp_path, [{"prompt": "a"}, {"prompt": "too long"}, {"prompt": "b"}])) == 0
    assert [row["messages"][0]["content"] for row in read_out(tmp_path)] == ["a", "b"]
    assert "left out 1: 400 " in capsys.readouterr().out


def test_an_answer_cut_at_the_limit_is_counted_ends_its_conversation_and_is_not_taught_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path, [{"turns": ["a", "b" * 50, "c"]}])
    with CompletionServer() as server:
        assert run(server, prompts) == 0
    [row] = read_out(tmp_path)
    assert [message["content"] for message in row["messages"]] == ["a", "re: a", "b" * 50, "re: " + "b" * 36]
    assert row["finished"] is False
    assert "0 finished, 1 cut at the limit" in capsys.readouterr().out
    tokenizer = save_chat_model(tmp_path / "model")
    arguments = ["--model", tmp_path / "model", "--input", tmp_path / "out.jsonl", "--out", tmp_path / "set"]
    assert prepare.main([str(word) for word in arguments]) == 0
    sample = Dataset.open(tmp_path / "set").read(0)
    assert read_supervised(tokenizer, sample) == [f"re: a{END}", "re: " + "b" * 36]


def test_recorded_tool_results_are_kept_and_recorded_answers_are_not(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    recorded = [say("user", "weather?"), {**say("assistant", None), "tool_calls": [call]}, say("tool", "rain")]
    row = {"messages": [*recorded, say("assistant", "old"), say("user", "thanks"), say("assistant", "old")], "tools": tools}
    with CompletionServer() as server:
        assert run(server, write_rows(tmp_path, [row])) == 0
    [out] = read_out(tmp_path)
    assert out["tools"] == tools and out["finished"] is True
    assert [(message["role"], message["content"]) for message in out["messages"]] == [
        ("user", "weather?"),
        ("assistant", ""),
        ("tool", "rain"),
        ("assistant", "re: rain"),
        ("user", "thanks"),
        ("assistant", "re: thanks"),
    ]
    assert [message.get("weight") for message in out["messages"]] == [None, 0, None, None, None, None]
    sent = server.requests[0]
    assert sent["tools"] == tools and "weight" not in sent["messages"][1]
    assert sent["messages"][1]["tool_calls"] == [call | {"function": {"name": "f", "arguments": '{"x": 1}'}}]


def test_an_answer_that_calls_a_tool_ends_its_conversation(tmp_path: Path) -> None:
    with CompletionServer() as server:
        assert run(server, write_rows(tmp_path, [{"turns": ["use the tool", "and then?"]}])) == 0
    [row] = read_out(tmp_path)
    assert len(row["messages"]) == 2 and row["messages"][1]["tool_calls"][0]["function"]["name"] == "f"


def test_the_key_of_the_server_is_sent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    with CompletionServer() as server:
        assert run(server, write_rows(tmp_path, [{"prompt": "a"}]), "--api-key-file", str(tmp_path / "key")) == 0
    assert server.keys == {"Bearer secret"}


def test_without_a_limit_the_server_decides(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path, [{"prompt": "a"}])
    with CompletionServer() as server:
        where = ["--server", server.url, "--server-model", "target", "--out", str(tmp_path / "out.jsonl")]
        regenerate.main([*where, "--prompts", str(prompts)])
    assert server.requests and "max_tokens" not in server.requests[0]
