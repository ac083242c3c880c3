"""lm-eval-harness through a KVarN cache: ``python -m kvarn_hf.lm_eval --model kvarn ...``, or ``KVarNLM`` in Python."""

from kvarn_hf.evaluation.harness import KVarNLM, main

__all__ = ["KVarNLM", "main"]

if __name__ == "__main__":
    main()
