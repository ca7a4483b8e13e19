"""Questions over retrieved documents. Prompts share documents. Whether a prefix cache can use that depends on their
order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Literal

from loadgen.workloads.base import ChatMessage, Piece, Session, Turn
from loadgen.workloads.draws import checked, rng_of
from loadgen.workloads.endless import Popular

RagOrder = Literal["fixed", "shuffled", "sorted"]


@dataclass(frozen=True, slots=True)
class Rag(Popular):
    """Short shared instructions, some documents, a unique question."""

    name: str = "rag"
    seed: int = 1
    documents: int = 200
    zipf: float = 1.0
    """Document i (from 1) has popularity i ** -zipf."""
    document_tokens: int = 600
    documents_per_question: int = 4
    rag_order: RagOrder = "shuffled"
    """fixed: the document found first always comes with the same other documents, in the same order. shuffled: each
    document is drawn independently, in any order. sorted: the same draws, in the order of the documents' numbers."""
    instruction_tokens: int = 100
    question_tokens_min: int = 20
    question_tokens_max: int = 60
    output_tokens: int = 64

    units: ClassVar[str] = "documents"

    @property
    def unit_tokens(self) -> float:
        """Return the tokens of a document."""
        return self.document_tokens

    def session(self, number: int) -> Session:
        """Return one question with its documents. Its group is the first document, because only prompts with the same
        first document share document tokens."""
        rng = rng_of(self.seed, "session", checked(number, None))
        found = self._retrieved(rng)
        pieces = [Piece(f"d{self.seed}-{document + 1}", self.document_tokens) for document in found]
        tokens = rng.randint(self.question_tokens_min, self.question_tokens_max)
        asked = Piece(f"q{self.seed}-{number}", tokens, "question")
        messages = (
            ChatMessage("system", (Piece(f"i{self.seed}", self.instruction_tokens),)),
            ChatMessage("user", (*pieces, asked)),
        )
        return Session(number, f"document {found[0] + 1}", (Turn(messages, self.output_tokens),))

    def _retrieved(self, rng: random.Random) -> list[int]:
        if self.rag_order == "fixed":
            first = self._popularity.draw(rng)
            others = self._popularity.draw_distinct(rng_of(self.seed, "topic", first), self.documents_per_question)
            return [first, *(document for document in others if document != first)][: self.documents_per_question]
        found = self._popularity.draw_distinct(rng, self.documents_per_question)
        if self.rag_order == "sorted":
            return sorted(found)
        rng.shuffle(found)
        return found
