"""An opponent behind an OpenAI-compatible server: messages in, text out.

Called by the agent loop for the turns of the role that is not trained. The opponent's tokens are
never part of a trajectory, so text is all that is needed of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medserl_agentloop.core.chat import ChatClient, stop_fields
from medserl_agentloop.core.client import NoAnswer
from medserl_agentloop.core.interaction import Message
from medserl_agentloop.core.opponent_config import OpponentConfig

POOL_VERSION = "global_step_"
"""How the versions of a checkpoint pool begin; verl names its checkpoint folders so."""


class OpponentError(RuntimeError):
    """The opponent gave no answer; the message says why, in a few words."""


@dataclass(frozen=True)
class OpponentTurn:
    """One turn of the opponent's.

    Attributes:
        text: What it wrote; reasoning that the server split off is put back in front.
        tokens: Its length, as the server counts.
        truncated: Whether the token budget cut it off.
        version: What played: the served model's name, or the checkpoint in a pool.
    """

    text: str
    tokens: int
    truncated: bool
    version: str


class HttpOpponent:
    """Asks the server for turns.

    Args:
        config: The run's ``selfplay.opponent`` node.
        special_tokens: Special tokens of the policy's tokenizer; messages may not smuggle them in.
    """

    def __init__(self, config: OpponentConfig, special_tokens: list[str]) -> None:
        self.config = config
        self._chat = ChatClient(config.client("/v1"), special_tokens)

    async def play(
        self, messages: list[Message], *, max_tokens: int, prefix: str = "", stop: Sequence[str] = ()
    ) -> OpponentTurn:
        """The opponent's turn, which the prompt begins with ``prefix`` and the strings in ``stop`` end.

        Raises:
            OpponentError: No usable answer after all attempts.
        """
        fields = {"max_tokens": max_tokens, **stop_fields(stop), **self.config.sampling.model_dump()}
        try:
            answer = await self._chat.complete(messages, fields, prefix)
        except NoAnswer as error:
            raise OpponentError(error.reason) from None
        version = answer.model or str(self.config.model)
        if self.config.kind == "pool":
            # The answer itself names the weights that gave it. Whatever else a worker could look at (a
            # file, the row's step) may be older or newer than what the server played with.
            version = str(answer.weights)
            if not version.startswith(POOL_VERSION):
                raise OpponentError(f"the server played with weights {answer.weights!r}, which are not of the pool")
        return OpponentTurn(answer.text, answer.tokens, answer.truncated, version)
