"""Line retrieval: nothing to download."""

import datasets

from kvarn_hf.evaluation.prompts import line_retrieval


def load(lines=(20, 50, 100, 200), samples=50, seed=0, **_):
    """``samples`` questions for each number of lines."""
    rows = [
        {"lines": count, "prompt": question.prompt, "opening": question.opening, "answer": question.answer}
        for count in lines
        for question in line_retrieval(count, samples, seed)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def score(doc, results):
    """Whether the generated text begins with the number."""
    right = float(results[0].strip().startswith(doc["answer"]))
    return {"acc": right, f"acc_{doc['lines']}_lines": right}
