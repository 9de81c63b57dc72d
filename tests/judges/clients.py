"""All clients that ask a judge's or a model's server, asked alike; and a server of raw bytes."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from judges.games import played
from judges.test_llm import PAIR

from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import judge_game
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import HttpJudge
from medserl_agentloop.games.medical.records import MedicalRecord
from medserl_agentloop.medical_team import create_medical_judge_remote_function

CLIENTS = ("http", "llm", "medical_team")
NO_ANSWER = "no answer: "


def ask(client: str, url: str, games: int = 1, key_env: str | None = None, timeout_s: float = 5.0) -> list[str]:
    """What ``client`` makes of a server's answers, all its words; they begin with NO_ANSWER if there is none."""
    server = JudgeServer(url=url, model="m", api_key_env=key_env, timeout_s=timeout_s, retries=0, batch_wait_ms=5)
    records = [played(n) for n in range(games)]
    if client == "medical_team":
        queries = [
            {"game_idx": n, "medical_note": r.presented_note, "assessment": "Safe", "game_category": r.category.value}
            for n, r in enumerate(records)
        ]
        labels = create_medical_judge_remote_function(url, timeout_s)("", queries)
        return [NO_ANSWER * one["is_parsing_error"] + one["judge_reasoning"] for one in labels.values()]
    judge = HttpJudge(server) if client == "http" else LlmJudge(server, PAIR)

    async def judged() -> None:
        await asyncio.gather(*(judge_game(judge, record) for record in records))

    asyncio.run(judged())
    return [NO_ANSWER * (record.void is not None) + words_of(record) for record in records]


def words_of(record: MedicalRecord) -> str:
    return f"{record.void} {record.judgement.model_dump_json() if record.judgement else ''}"


@contextmanager
def raw_server(answer: bytes, *, drip_s: float = 0.0) -> Iterator[str]:
    """Answers each request with these very bytes, all at once or one by one."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        try:
            connection.recv(1 << 20)
            for part in [answer] if not drip_s else [answer[n : n + 1] for n in range(len(answer))]:
                connection.sendall(part)
                if drip_s and over.wait(drip_s):
                    break
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass
        finally:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        # It ends the wait. Closed alone, the next server could get this one's file number, and a signal would have the
        # thread accept there.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()


def http_answer(body: bytes, *headers: str) -> bytes:
    head = ["HTTP/1.1 200 OK", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
