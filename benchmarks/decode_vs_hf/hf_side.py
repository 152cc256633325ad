"""The peer: `generate` of transformers."""

from importlib import metadata

from benchmarks.decode_vs_hf.prompts import prompts, without_end
from benchmarks.side import Channel, argument, clock, device, serve


def main() -> None:
    channel, settings = Channel(), argument()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    model = model.eval().to(device())
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    pad = tokenizer.pad_token_id
    rows = [
        ids for ids in prompts(tokenizer, settings["prompts"]) for _ in range(settings["rows"] // settings["prompts"])
    ]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device())
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device())
    without_end(model, tokenizer)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)

    def once() -> dict[str, float]:
        start = clock()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=settings["tokens"], pad_token_id=pad, **sampling
            )
        seconds = clock() - start
        tokens = (out.shape[1] - width) * len(rows)
        return {"seconds": seconds, "tokens": tokens, "rate": tokens / seconds}

    serve(once, channel, versions={name: metadata.version(name) for name in ("transformers", "torch")})


if __name__ == "__main__":
    main()
