"""What of a task is asked: a question with its prompt, and the engine's job."""

from dataclasses import dataclass

from calibeval.ask.engines import Job
from calibeval.ask.prompts import Prompt
from calibeval.ask.task_files import Normaliser, ScoringName


@dataclass(frozen=True)
class Item:
    """A question, what an engine is asked of it, and how the task's users compare the answers."""

    prompt: Prompt
    job: Job
    scoring: ScoringName
    normalise: Normaliser
    truncated: int  # tokens cut from the left

    @property
    def id(self) -> str:
        """The question's id, by which its record is known."""
        return self.prompt.question.id
