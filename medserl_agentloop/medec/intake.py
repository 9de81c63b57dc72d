"""One input on its way into the store: text ids claimed, empty records counted, text repaired if asked.

``reader.py`` makes one per input and hands it to the reader of the input's format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from medserl_agentloop.medec.encoding_repair import repair_encoding
from medserl_agentloop.medec.fields import RowPlace
from medserl_agentloop.medec.store import VignetteStore


@dataclass
class Intake:
    """What a format's reader tells about the rows it meets.

    Attributes:
        store: Where text ids are claimed.
        repair: Whether misread UTF-8 is put right.
        records: Rows with content.
        dropped_empty: Records without any content.
        repaired: Rows in which a misread character was put right.
        not_joined: Text ids of OpenRLHF rows whose note is in no ``--join`` file, and why.
        joined: OpenRLHF rows whose case was found.
    """

    store: VignetteStore
    repair: bool = False
    records: int = 0
    dropped_empty: int = 0
    repaired: int = 0
    joined: int = 0
    not_joined: list[tuple[str, str]] = field(default_factory=list)

    def claim(self, place: RowPlace) -> None:
        """Count a row with content; refuse it where another has its id."""
        self.records += 1
        self.store.claim(place)

    def drop_empty(self) -> None:
        """Count a record without content."""
        self.dropped_empty += 1

    def text_of(self, cells: Mapping[str, str], columns: Iterable[str]) -> dict[str, str]:
        """The cells, with misread UTF-8 in ``columns`` put right where that was asked for."""
        if not self.repair:
            return dict(cells)
        repaired = {name: repair_encoding(value) if name in columns else value for name, value in cells.items()}
        self.repaired += repaired != cells
        return repaired
