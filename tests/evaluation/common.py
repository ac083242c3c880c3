"""What the tests of suites share."""

import json

CACHES = ["kvarn_k2v2_g128", "rtn_k2v2_g128"]


def records(out, suite):
    return json.loads((out / f"{suite}_lettered.json").read_text())["results"]
