"""Whether an answer is right."""

import re

from kvarn_hf.evaluation.sandbox import passes


def humaneval(doc, results):
    """Run the completed function against its tests."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}


def gsm8k(doc, results):
    """Compare the number after "The answer is", or else the last number, with the example's."""
    stated = re.search(r"[Tt]he answer is[^\d-]*(-?[\d,]*\.?\d+)", results[0])
    numbers = [stated[1]] if stated else re.findall(r"-?[\d,]*\.?\d+", results[0])[-1:]
    wanted = doc["answer"].split("####")[-1]
    return {"exact_match": float(bool(numbers) and _value(numbers[0]) == _value(wanted))}


def math_integer(doc, results):
    r"""Compare the last ``\boxed{}``, or else the last integer, with the solution's."""
    boxed = re.findall(r"\\boxed\{\s*(-?[\d,]+)\s*\}", results[0]) or re.findall(r"-?\d[\d,]*", results[0])
    return {"exact_match": float(bool(boxed) and _value(boxed[-1]) == doc["integer"])}


def ifeval(doc, results):
    """IFEval's own checks, as lm-eval has them."""
    from lm_eval.tasks.ifeval.utils import process_results

    return process_results(doc, results)


def ifeval_instructions(items):
    """Share of instructions that were followed."""
    from lm_eval.tasks.ifeval.utils import agg_inst_level_acc

    return agg_inst_level_acc(items)


def _value(number):
    try:
        return float(number.replace(",", "").strip())
    except ValueError:
        return None
