"""The laboratory's commands and their options, as Typer reads them; each hands over to a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from specdecode_ref.cli.commands import app

__all__ = ["app"]

vectors_app = typer.Typer(help="Test vectors for verifiers in any language.")
app.add_typer(vectors_app, name="vectors")


@app.command("compare-verifiers")
def compare_verifiers(
    trace: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="A trace: its drafts, judged by every rule.")
    ] = None,
    p: Annotated[str | None, typer.Option("--p", help="The target's law, as 0.5,0.3,0.2.")] = None,
    q: Annotated[str | None, typer.Option("--q", help="The draft's law.")] = None,
    random: Annotated[int | None, typer.Option("--random", help="Random laws over so many tokens.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random laws.")] = 0,
    gamma: Annotated[int | None, typer.Option("--gamma", help="Tokens to draft in a chain. (default: 2)")] = None,
    tree: Annotated[str | None, typer.Option("--tree", help="The draft's shape: chain:2 or sampled:2,1.")] = None,
    draw: Annotated[
        str, typer.Option("--draw", help="with_replacement, without_replacement or deterministic.")
    ] = "with_replacement",
    model: Annotated[str | None, typer.Option("--model", help="The trace's target. (default: as recorded)")] = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="The trace's draft model.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="The dtype to run in. (default: as recorded)")] = "auto",
    rounds: Annotated[int, typer.Option("--rounds", help="So many of the trace's rounds with a draft.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Compare all verifiers on the same drafts: expected accepted length, output law, distance from the target's.

    On two laws, or random ones, everything is exact. On a trace the drafts are those recorded, and the accepted
    length is exact over the coins.
    """
    from specdecode_ref.cli import compare as command

    return command.run(
        command.Request(
            trace=trace,
            p=p,
            q=q,
            random=random,
            seed=seed,
            gamma=gamma,
            tree=tree,
            draw=draw,
            model=model,
            draft_model=draft_model,
            dtype=dtype,
            rounds=rounds,
            json=as_json,
        )
    )


@app.command()
def diff(
    a: Annotated[str | None, typer.Argument(metavar="[A]", help="A trace, or a file of token ids.")] = None,
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="Another one of the same prompt.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="smollm2, a folder, a .gguf file, or org/name. (default: smollm2)")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt; - reads it from standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option("--prompt-ids", help="The prompt as token ids: 1,2,3.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Without files: decode plain and with this drafter.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="What the drafter 'model' uses.")] = None,
    verifier: Annotated[str, typer.Option("--verifier", help="Of the speculative run.")] = "auto",
    gamma: Annotated[int | None, typer.Option("--gamma", help="Tokens to draft in a chain.")] = None,
    tree: Annotated[str | None, typer.Option("--tree", help="The draft's shape, such as sampled:3,2,1.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Above 0 with --verifier match only.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of both runs.")] = 0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Where both runs end at the latest.")] = 128,
    dtype: Annotated[str, typer.Option("--dtype", help="The dtype of both outputs; a trace does not say.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Explain where two outputs part: a tie that rounding decided, or a defect.

    A and B are two traces, or two files of token ids with --model and --prompt (or --prompt-ids). Without files,
    --prompt and --drafter run plain and speculative decoding here. Exit code 0: no difference or a tie; 1: a defect.
    """
    from specdecode_ref.cli import diff as command

    return command.run(
        command.Request(
            a=a,
            b=b,
            model=model,
            prompt=prompt,
            prompt_ids=prompt_ids,
            raw=raw,
            drafter=drafter,
            draft_model=draft_model,
            verifier=verifier,
            gamma=gamma,
            tree=tree,
            sampling={
                "temperature": temperature,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
            },
            seed=seed,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            json=as_json,
        )
    )


@app.command()
def fidelity(
    verifier: Annotated[str, typer.Option("--verifier", help="module:function, or one of ours, such as chain.")],
    batched: Annotated[bool, typer.Option("--batched", help="A batched function, as engines have them.")] = False,
    kind: Annotated[
        str | None, typer.Option("--kind", help="chain, tree or both. (default: trees too unless it refuses them)")
    ] = None,
    vocab: Annotated[int, typer.Option("--vocab", help="Tokens of the vocabulary, 2 to 64.")] = 5,
    gamma: Annotated[int, typer.Option("--gamma", help="Tokens of a chain, 1 to 8.")] = 2,
    samples: Annotated[int | None, typer.Option("--samples", help="Sequences to sample.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of laws and coins.")] = 0,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds that one call may take.")] = 10.0,
    draws: Annotated[
        list[str] | None,
        typer.Option("--draw", help="with_replacement, without_replacement or deterministic; may be given again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Find out whether a verifier, anyone's, keeps the target's law: exit code 0 lossless, 1 not, 2 usage."""
    from specdecode_ref.cli import fidelity as command

    return command.run(
        command.Request(
            verifier=verifier,
            batched=batched,
            kind=kind,
            vocab=vocab,
            gamma=gamma,
            samples=samples,
            seed=seed,
            time_limit=time_limit,
            draws=draws or [],
            json=as_json,
        )
    )


@vectors_app.command("write")
def vectors_write(
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="Where to; standard output without it.")] = None,
) -> int:
    """Make the shipped test vectors anew from their seed; the result is the same to the byte."""
    from specdecode_ref.cli import vectors as command

    return command.write(file)


@vectors_app.command("check")
def vectors_check(
    answers: Annotated[str, typer.Argument(metavar="ANSWERS", help="JSON, or one JSON object a line.")],
    vectors: Annotated[
        str | None, typer.Option("--vectors", metavar="FILE", help="Check against this file. (default: as shipped)")
    ] = None,
    verifier: Annotated[
        list[str] | None, typer.Option("--verifier", help="Only this rule's cases; may be given again.")
    ] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Excuse other answers where rounding to float32 may decide.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> int:
    """Check a program's answers to the test vectors: exit code 0 all right, 1 wrong or missing, 2 unreadable."""
    from specdecode_ref.cli import vectors as command

    return command.check(answers, vectors, verifier or [], float32, as_json)
