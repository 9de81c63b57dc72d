"""All clients that ask a judge's or a model's server, asked alike; and a server of raw bytes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

from judges.games import played
from judges.test_llm import PAIR

from medserl_agentloop.games.medical.config import JudgeServer
from medserl_agentloop.games.medical.judges import judge_game
from medserl_agentloop.games.medical.judges.llm import LlmJudge
from medserl_agentloop.games.medical.judges.protocol import HttpJudge
from medserl_agentloop.medical_team import create_medical_judge_remote_function

CLIENTS = ("http", "llm", "medical_team")
NO_ANSWER = "no answer: "


def ask(client: str, url: str, games: int = 1) -> list[str]:
    """What ``client`` makes of a server's answers, all its words; they begin with NO_ANSWER if there is none."""
    records = [played(n) for n in range(games)]
    if client == "medical_team":
        queries = [
            {"game_idx": n, "medical_note": r.presented_note, "assessment": "Safe", "game_category": r.category.value}
            for n, r in enumerate(records)
        ]
        labels = create_medical_judge_remote_function(url, 5.0)("", queries)
        return [NO_ANSWER * one["is_parsing_error"] + one["judge_reasoning"] for one in labels.values()]
    server = JudgeServer(url=url, model="m", timeout_s=5.0, retries=0, batch_wait_ms=5)
    judge = HttpJudge(server) if client == "http" else LlmJudge(server, PAIR)

    async def judged() -> None:
        await asyncio.gather(*(judge_game(judge, record) for record in records))

    asyncio.run(judged())
    return [f"{NO_ANSWER * (r.void is not None)}{r.void} {r.judgement and r.judgement.model_dump()}" for r in records]


@contextmanager
def raw_server(answer: bytes, *, drip_s: float = 0.0) -> Iterator[str]:
    """Answers each request with these very bytes, all at once or one by one."""
    over = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(1 << 20)
                for part in [answer] if not drip_s else [answer[n : n + 1] for n in range(len(answer))]:
                    self.request.sendall(part)
                    if drip_s and over.wait(drip_s):
                        break

    class Server(ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        over.set()
        server.shutdown()


def http_answer(body: bytes, *headers: str) -> bytes:
    head = ["HTTP/1.1 200 OK", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
