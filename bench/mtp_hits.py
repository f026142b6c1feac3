#!/usr/bin/env python3
"""Accuracy of the MTP modules of a model (--mtp) on later tokens: python3 bench/mtp_hits.py STEP SHARD

STEP is the folder of a run's checkpoint, SHARD a validation shard. The library transformers computes the output of the
main model, then of one module after another. A module runs as a model of one layer. Its input is DeepSeek-V3's
concatenation (arXiv 2412.19437, equation 21), with the two halves in the order of the published weights.

Printed are, for the main model and each module, the mean loss and the share of tokens that its first choice hits. For
a module there is also the share of tokens whose first choice equals that of the main model. The main model has seen the
tokens between. Speculative decoding accepts these tokens.
"""
import argparse
import glob
import os
import sys

import numpy
import torch
import transformers
from safetensors import safe_open


def weight(folder, name):
    for path in glob.glob(os.path.join(folder, "*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():
                return file.get_tensor(name)
    sys.exit(f"mtp_hits.py: error: {folder} has no {name}")


def rmsnorm(x, w, eps):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype) * w


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("step")
    parser.add_argument("shard")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_grad_enabled(False)

    # The blocks of the modules are ordinary layers: one model has all of them.
    config = transformers.AutoConfig.from_pretrained(args.step)
    L, modules = config.num_hidden_layers, config.num_nextn_predict_layers
    config.num_hidden_layers = L + modules
    model = transformers.AutoModelForCausalLM.from_pretrained(args.step, config=config, dtype=torch.float32)
    model = model.to(args.device).eval()
    layers, norm = model.model.layers, model.model.norm.weight.clone()
    embed = model.get_input_embeddings()

    with open(args.shard, "rb") as file:
        version = numpy.frombuffer(file.read(1024)[:8], "<i4")[1]
        tokens = numpy.frombuffer(file.read(), "<u2" if version == 1 else "<u4").astype(numpy.int64)
    T = args.seq_len
    windows = min(args.tokens, len(tokens) - 1) // T
    sums = torch.zeros(1 + modules, 4, dtype=torch.float64)  # loss, hits, accepted, tokens
    for w in range(0, windows, 4):
        batch = [tokens[i * T:i * T + T + 1] for i in range(w, min(w + 4, windows))]
        ids = torch.tensor(numpy.stack(batch)).to(args.device)
        x, first = embed(ids[:, :T]), None
        for k in range(1 + modules):
            # Input of module k: the tokens k positions ahead, and the previous output. Its output has its own norm.
            if k > 0:
                names = {name: weight(args.step, f"model.layers.{L + k - 1}.{name}.weight").to(x)
                         for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
                near = rmsnorm(embed(ids[:, k:T]), names["enorm"], config.rms_norm_eps)
                far = rmsnorm(x[:, :T - k], names["hnorm"], config.rms_norm_eps)
                x = torch.cat((near, far), -1) @ names["eh_proj"].T
            model.model.layers = layers[:L] if k == 0 else layers[L + k - 1:L + k]
            model.config.num_hidden_layers = model.model.config.num_hidden_layers = len(model.model.layers)
            model.model.norm.weight.copy_(norm if k == 0 else names["shared_head.norm"])
            x = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
            logits, target = model.lm_head(x), ids[:, 1 + k:]
            choice = logits.argmax(-1)
            first = choice if k == 0 else first
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            sums[k] += torch.tensor([loss.item(), (choice == target).sum().item(), (choice == first[:, k:]).sum().item(),
                                     target.numel()])
    for k, (loss, hits, accepted, n) in enumerate(sums.tolist()):
        print(f"token {k + 1} ahead: loss {loss / n:.5f}, {hits / n:.2%} hit"
              + (f", {accepted / n:.2%} as the main model chooses then" if k else ""))


if __name__ == "__main__":
    main()
