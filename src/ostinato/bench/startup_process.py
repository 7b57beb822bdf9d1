"""One start of an engine, measured in its own process; prints one JSON line.

python -m ostinato.bench.startup_process '{"born": 1234.5, "options": {...}, "ladders": [...]}'

Nothing heavy is imported at the top: the imports are measured too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Measure what was requested and print it; everything else that is printed goes to standard error."""
    begun = time.time()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    result = _one_start(asked["born"], begun, asked["options"])
    result["ladders"] = [_ladder(asked["options"], ladder) for ladder in asked["ladders"]]
    answers.write(json.dumps(result) + "\n")
    answers.flush()


def _one_start(born: float, begun: float, options: dict[str, Any]) -> dict[str, Any]:
    """From the birth of the process to the first token."""
    import torch

    torch_imported = time.time()
    from ostinato.engine.llm import LLM
    from ostinato.engine.parameters.sampling_params import SamplingParams

    from .engine_facts import engine_facts

    imported = time.time()
    with LLM(progress=False, **options) as llm:
        ready = time.time()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": list(range(1, 17))}], params)
        assert output.error is None, output.error
        done = time.time()
        return {
            "seconds": {
                "interpreter": begun - born,
                "import torch": torch_imported - begun,
                "import ostinato": imported - torch_imported,
                "engine": ready - imported,
                "first token": done - ready,
                "total": done - born,
            },
            "threads": torch.get_num_threads(),
            "first_token": output.outputs[0].token_ids,
            **engine_facts(llm),
        }


def _ladder(options: dict[str, Any], ladder: dict[str, Any]) -> dict[str, Any]:
    """The same start again in this process, warm, with other graphs."""
    from ostinato.engine.llm import LLM

    from .engine_facts import engine_facts

    with LLM(progress=False, **{**options, **ladder["options"]}) as llm:
        return {"kind": ladder["kind"], "rungs": ladder["rungs"], **engine_facts(llm)}


if __name__ == "__main__":
    main()
