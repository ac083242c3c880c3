"""``kvarn inspect``: what it prints and writes, and what it says of bad input."""

import re

import pytest
from typer.testing import CliRunner

from kvarn_hf.cli import app
from tests.models_lettered import save_lettered_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lettered")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 12)
    (folder / "short.txt").write_text("the quick brown fox")
    return save_lettered_model(folder)


@pytest.fixture
def run(monkeypatch, folder):
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments, text="text.txt"):
        options = ["inspect", "--model", folder, "--text", folder / text, "--device", "cpu", "--dtype", "float32"]
        return CliRunner().invoke(app, [str(argument) for argument in (*options, *arguments)])

    return invoke


class TestCommand:
    def test_tables_figures_and_suggestion(self, run, tmp_path):
        result = run("--tokens", 450, "--plots", tmp_path / "plots")
        assert result.exit_code == 0, result.output
        text = re.sub(r"\s+", " ", result.output)
        for expected in (
            "Layers of the model with kvarn_k4v2_g128",
            "attention KL",
            "over 450 tokens",
            "kvarn_k8v4_g128",
            "kvarn_k4v2_g128, skipping",
            "No layer has outlier key channels.",
            "Suggestion: kvarn_k",
            "for 32,768 tokens",
            'KVarNCache(model.config, "kvarn_k',
        ):
            assert expected in text, expected
        written = sorted(path.name for path in (tmp_path / "plots").iterdir())
        assert written == ["channels.png", "heads.png", "trade_off.png", "widths.png"]
        for name in written:
            picture = (tmp_path / "plots" / name).read_bytes()
            assert picture.startswith(b"\x89PNG") and len(picture) > 5_000

    def test_nothing_is_cut_off_in_a_narrow_terminal(self, run, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        result = run("--tokens", 400)
        assert result.exit_code == 0, result.output
        assert "…" not in result.output
        assert "kvarn_k2v2_g128" in result.output

    def test_another_method_is_spelled_out(self, run):
        result = run("--tokens", 330, "--method", "published", "--preset", "kvarn_k4v2_g64", "--max-kl", 100)
        assert result.exit_code == 0, result.output
        text = re.sub(r"\s+", " ", result.output)
        assert 'KVarNCache(model.config, KVarNConfig.from_preset("kvarn_k2v2_g64", method="published"))' in text
        assert "g128" not in text

    @pytest.mark.parametrize(
        ("arguments", "text", "message"),
        [
            ((), "short.txt", "text and tokens must give at least 385 tokens, got 19 of '.*short.txt'"),
            ((), "none.txt", "none.txt"),
            (("--max-kl", 0), "text.txt", "max_kl must be above 0, got 0"),
            (("--method", "magic"), "text.txt", "method must be one of kvarn, published, hadamard, rtn, got 'magic'"),
            (("--preset", "k4"), "text.txt", "preset must be one of"),
        ],
    )
    def test_bad_input_gets_one_sentence(self, run, arguments, text, message):
        result = run(*arguments, text=text)
        assert result.exit_code == 2
        assert re.search(message, re.sub(r"\s+", " ", result.output)), result.output
        assert "Traceback" not in result.output
