"""scripts/model_card.py without a run: python3 tests/tools/test_model_card.py. Cards of runs: tests/model/test_hub.py."""
import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"))
import model_card  # noqa: E402


class Card(unittest.TestCase):
    CONFIG = dict(model_type="deepseek_v3", num_experts_per_tok=2, n_routed_experts=8, n_shared_experts=1, num_hidden_layers=4,
                  first_k_dense_replace=1, num_nextn_predict_layers=0, hidden_size=128, num_attention_heads=4, q_lora_rank=None,
                  kv_lora_rank=64, vocab_size=257, max_position_embeddings=32, eos_token_id=256)
    OPTIONS = {"train": "x_*.bin", "val": "y_*.bin", "tokens-per-step": 64, "out": "runs/x", "init": "", "tokenizer": ""}

    def card(self, manifest, log=None):
        with tempfile.TemporaryDirectory() as folder:
            step = pathlib.Path(folder) / "step_00000006"
            step.mkdir()
            if log:
                (step.parent / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), "utf-8")
            return model_card.card("x", step, manifest, self.CONFIG, {"a": 100, "b.mlp.experts.0.w": 80}, "bfloat16")

    def test_hostile_values(self):
        """They stay in their lines: the card has the same lines, fences and front matter, and a word of the shell is one."""
        usual = self.card(dict(step=6, options=self.OPTIONS)).splitlines()
        for odd in ("a|b", "`x` ```", "a\n---\n# T\n```\nb", "'\"$(x)\\", "<b>&amp;*_[x](y)", "\ud800\u2028\r", "k: [v", " "):
            options = {**self.OPTIONS, "train": f"/home/{odd}/{odd}", "val": odd, "out": odd, "tokenizer": f"/home/{odd}", "init": f"/home/{odd}"}
            card = self.card(dict(step=6, options=options))
            card.encode("utf-8")
            self.assertNotIn("home", card)
            lines = card.replace(" \\\n    --", " --").splitlines()  # the options of the run are one line
            self.assertEqual(lines[:8], usual[:8])
            self.assertEqual([line for line in lines if line[:1] in "#`"], [line for line in usual if line[:1] in "#`"])
            self.assertEqual(len(lines), len(usual), card)
            spans = [line.count("`") for line in lines if line.startswith("- ")]
            self.assertTrue(all(n % 2 == 0 for n in spans), card)

    def test_folders_are_left_out(self):
        for text, want in (("/home/me/x_*.bin", "x_*.bin"), ("x_*.bin", "x_*.bin"), ("../runs/x/", "x"), ("", ""), ("/a,b/c:d/x", "x"),
                           ("/a/x_*.bin:0.5,b/c,d/y_*.bin:1e-1", "x_*.bin:0.5,y_*.bin:1e-1"), ("~/a/*/y:2", "y:2")):
            self.assertEqual(model_card.bare(text), want)

    def test_missing_fields(self):
        """They are not recorded, and give no losses."""
        log = [{**self.OPTIONS, "build": "b"}, dict(step=6, loss=1.25)]
        for manifest in ({}, dict(step=6), dict(step="6", options=5), dict(step=6, options={}), dict(options=self.OPTIONS),
                         dict(step=6.0, options=self.OPTIONS)):
            card = self.card(manifest, log)
            for words in ("- tokens: not recorded\n", "nats a token: not recorded\n", "newest start: not recorded\n"):
                self.assertIn(words, card)
            self.assertIn("\n- parameters: 180; active for a token: 120\n", card)

    def test_log_of_the_same_run(self):
        """Options of place may differ from those of the log, all others must not."""
        for change, known in (({}, True), (dict(out="y"), True), (dict(train="z"), False), ({"tokens-before": 64}, True),
                              ({"tokens-per-step": 32}, False)):
            card = self.card(dict(step=6, options=self.OPTIONS), [{**self.OPTIONS, **change}, dict(step=5, loss=9), dict(step=6, loss=1.25)])
            self.assertEqual("this step in nats a token: 1.2500\n" in card, known, change)
        loss = dict(step=6, loss=1.25)
        for log, step in (None, 6), ([[], self.OPTIONS, loss], 6), ([self.OPTIONS, dict(step=5, loss=9)], 6), ([self.OPTIONS, dict(step=6, loss=None)], 6), \
                ([self.OPTIONS, loss, dict(step=7, loss=1.25)], 7):  # the folder is that of step 6
            self.assertIn("this step in nats a token: not recorded\n", self.card(dict(step=step, options=self.OPTIONS), log), log)

    def test_names_of_the_hub(self):
        for text, want in (("my-model", "my-model"), ("a b", "a-b"), (".x..y--z.", "x-y-z"), ("\u4e2d", "NAME"), ("v0.1_b", "v0.1_b"),
                           ("x" * 100, "x" * 96)):
            self.assertEqual(model_card.hub_name(text), want)


if __name__ == "__main__":
    unittest.main()
