"""One call of a cell: a pass of a variant at one level, on inputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, repeat
from random import SystemRandom
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._functorch import config

from attnbench.catalogue.attention.stack import refusal
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import NO_STATE, NarrowState, behind, known, rolled_back, taken
from attnbench.catalogue.engines.decoding.unequal import ONE_LENGTH, joined
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.capabilities import Budgeted, Decoding, answered, chooser
from attnbench.contract.compiled import whole
from attnbench.contract.inputs import draw_gates, draw_qkv
from attnbench.contract.problem.padding import key_mask, real_tokens
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import Read
from attnbench.contract.spec import Spec
from attnbench.contract.task import NO_LABEL, Examples, Form, make_task
from attnbench.contract.variant import without_core
from attnbench.errors import AttnbenchError, Unsupported, UsageError
from attnbench.harness.inside.turns import SEEN, UNSEEN, MemoryWindows
from attnbench.harness.wire.process import choose_products
from attnbench.laws.exact_error import hold_rows
from attnbench.measure.laps import Laps
from attnbench.measure.memory import out_of_memory, state_bytes
from attnbench.measure.reuse import Recent
from attnbench.models.decoder import Decoder, EncoderDecoder
from attnbench.models.encoder import Encoder, MultiHead, as_layer, cross_entropy
from attnbench.models.fewer_queries import remaining
from attnbench.suite.cell import OF_TOKENS, STEPS, UNTOUCHED, Cell, ModelSize

if TYPE_CHECKING:
    from attnbench.models.pretrained.subject import Windows as Text

_KEPT_ELEMENTS = 2**22
"""Draws with at most this many elements in q (48 MiB for q, k and v) are kept for the next variant."""
Draw = Callable[[Spec, Shape, int, Sequence[Read]], Sequence[Tensor]]
Trained = Callable[[Cell], "tuple[nn.Module, Text]"]


Make = Callable[[Iterator[Any]], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """A repeatable call, with the sizes of its inputs and state."""

    run: Callable[[], Any]
    """Runs it once, on inputs that take turns (see :mod:`attnbench.harness.inside.turns`)."""
    on: Callable[[int], Callable[[], Any]]
    """Like ``run``, on the inputs of one number. Numbers below ``SEEN`` take turns in ``run``, which sees no others."""
    input_bytes: int
    """Bytes read by a call. The windows add less than a quarter of that to the memory used, or a few dozen tokens."""
    param_bytes: int
    state_bytes: int | None = None
    """Bytes of the state of a decoding step, or of that behind a prompt."""
    tokens_kept: int | None = None
    """Tokens of the prompt that a step reads, if it reads a part of them."""
    laps: Laps | None = None
    like: Tensor | None = None
    may_repeat: bool = False
    """True if inputs of two numbers may be equal by chance: a single token out of few."""
    uncompiled: Callable[[], Callable[[], Any]] | None = None
    """Makes ``on(0)`` without ``torch.compile``, if the call is compiled and cannot be looked into."""
    hold: Callable[[], str] | None = None
    """Holds random rows to the formula, for a variant that claims to be exact; returns the reason if it could not.

    Raises AttnbenchError if they are off by more than rounding.
    """
    select: Callable[[], Any] | None = None
    """Runs the choice of pairs alone, on the inputs of ``run``, for an operator that chooses before it attends."""
    rollback: Callable[[], Any] | None = None
    """Goes back to the state after the first half of the tokens of one step, if it takes several."""


def kept_draw(inputs: Spec, shape: Shape, seed: int, reads: Sequence[Read] = ()) -> Sequence[Tensor]:
    """q, k, v and the gates; the last q, k and v are kept if they are small: the next cell often has the same ones."""
    small = shape.B * shape.H * max(shape.N, shape.M) * shape.D <= _KEPT_ELEMENTS
    return *(_last_draw if small else draw_qkv)(inputs, shape, seed), *draw_gates(inputs, reads, shape, seed)


_last_draw = Recent(draw_qkv, 1)


def first_examples(cell: Cell) -> tuple[Form, Examples]:
    """The form of the cell's task, and the examples that the first step of a training on it sees."""
    assert cell.task is not None
    task = make_task(cell.task, cell.shape)
    return task.form, task.batch(cell.seed, 0, cell.shape.B)


def prepare(
    cell: Cell,
    move: Callable[[nn.Module, torch.device, torch.dtype], nn.Module] = nn.Module.to,
    draw: Draw = kept_draw,
    examples: Callable[[Cell], tuple[Form, Examples]] = first_examples,
    trained: Trained | None = None,
) -> Call:
    """Build the variant and its inputs; none of this is ever timed. ``trained`` None: read the trained model.

    Raises Unsupported if the mathematics or the input does not allow this cell, UsageError for unknown names.
    """
    _allow_cost(cell)
    if cell.launch == "graph" and not cell.device.startswith("cuda"):
        raise Unsupported(f"launch: {cell.device} has no CUDA graphs; write launch: auto, or measure on cuda")
    device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
    choose_products(of_one_row=cell.pass_ in STEPS)
    mask = key_mask(cell.shape, cell.padding)
    if mask is not None:
        _allow_padding(cell)
        mask = None if cell.pass_ == "decode" else mask.to(device)  # a state has no place for padding
    if cell.pass_ in STEPS:
        _allow_decoding(cell)
    cell = replace(cell, shape=cell.whole_shape)
    labels: Tensor | None = None
    if cell.level == "operator":
        module, inputs = _operator(cell, draw)
    elif cell.level == "layer":
        module, inputs = _layer(cell)
    elif cell.level == "pretrained":
        module, inputs, labels = _pretrained(cell, trained)
    else:
        module, inputs, labels = _model(cell, examples)
    module = move(module, device, dtype)
    if cell.state_dtype != "auto":
        module = NarrowState(module, getattr(torch, cell.state_dtype))
    own = cell.compile and not always_compiled(cell)
    made = _made(cell, module, inputs, mask, labels, compiled=own)
    first = [windows.at(0) for windows in inputs]
    return Call(
        run=made.call(cycle([made.turn(number) for number in range(SEEN)])),
        on=made.on,
        uncompiled=(lambda: _made(cell, module, inputs, mask, labels, compiled=False).on(0)) if own else None,
        select=_choosing(cell, module, inputs, mask),
        hold=_holding(cell, module, inputs, mask, made),
        like=_like(cell, first),
        may_repeat=cell.level == "model" and cell.pass_ == "decode",
        state_bytes=made.state_bytes,
        tokens_kept=_tokens_kept(cell, module),
        laps=made.laps,
        rollback=made.rollback,
        input_bytes=sum(t.nbytes for t in (*first, *(() if mask is None else (mask,)))),
        param_bytes=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
    )


def _choosing(
    cell: Cell, module: nn.Module, inputs: Sequence[MemoryWindows], mask: Tensor | None
) -> Callable[[], Any] | None:
    choosing = chooser(module)
    if cell.level != "operator" or cell.pass_ in STEPS or choosing is None:
        return None
    turns = cycle([[windows.at(number) for windows in inputs[:2]] for number in range(SEEN)])

    @torch.inference_mode()
    def select() -> Any:
        return choosing.select(*next(turns), key_mask=mask)

    return select


def _holding(
    cell: Cell, module: nn.Module, inputs: Sequence[MemoryWindows], mask: Tensor | None, made: _Made
) -> Callable[[], str] | None:
    if cell.variant.name == UNTOUCHED or cell.shape.query_stride > 1 or cell.architecture != "encoder":
        return None
    if not cell.entry.claims(cell.variant, causal=cell.shape.causal).exact:
        return None
    inside = [part.operator for part in module.modules() if isinstance(part, MultiHead)]
    plain = cell.shape.bias == "none" and cell.shape.sink == "none"  # else each layer has its own
    if cell.level != "operator" and not (inside and plain and cell.pass_ not in STEPS):
        return None
    chance, backward = SystemRandom(), cell.pass_ not in ("forward", *STEPS)

    def hold() -> str:
        number = SEEN + chance.randrange(UNSEEN)
        try:
            if cell.level == "operator":
                output = None if backward else made.on(number)()
                given, shape = [windows.at(number) for windows in inputs], cell.shape
                if cell.pass_ == "decode" or cell.kept_prefix:  # against the state of other tokens
                    rows, before, step = chance.choice(_parts_of_decoding(cell))
                    given = [
                        torch.cat((_tokens(all_.at(0)[rows], before), _tokens(last[rows], step)), -2)
                        for all_, last in zip(inputs, given, strict=True)
                    ]
                    shape = replace(shape, batch=len(given[0]), seq_len=step.stop, kv_len=None)
                    output = None if output is None else output[rows]
                hold_rows(module, given, shape, key_mask=mask, output=output, backward=backward)
                return ""
            operator, caught = chance.choice(inside), list[Any]()
            catch = operator.register_forward_pre_hook(
                lambda _, given, by: caught.append((given, by)), with_kwargs=True
            )
            with torch.inference_mode():
                module(*(windows.at(number) for windows in inputs), **({} if mask is None else {"key_mask": mask}))
            catch.remove()
            if caught:
                (found, named), *_ = caught
                with torch.inference_mode(mode=False):
                    given = [x.clone() for x in found]
                    seen = None if (seen := named.get("key_mask")) is None else seen.clone()
                # The operator's own length and padding: tokens may have been added, and two towers are one batch.
                own = replace(cell.shape, seq_len=given[0].shape[2], kv_len=None, added_tokens=0)
                hold_rows(operator, given, own, key_mask=seen, backward=backward)
        except Exception as error:
            if out_of_memory(error) is None:
                raise
            return "no memory to hold its rows to the formula"
        return ""

    return hold


def held_to_formula(call: Call, *, unchecked: bool) -> str:
    """Hold random rows of the call to the formula; return the reason if it could not, and with ``unchecked`` the error.

    Raises AttnbenchError if they are off by more than rounding.
    """
    try:
        return "" if call.hold is None else call.hold()
    except AttnbenchError as off:
        if not unchecked:
            raise
        return str(off)


def _operator(cell: Cell, draw: Draw) -> tuple[nn.Module, list[MemoryWindows]]:
    if cell.entry.kind == "mixer":
        raise Unsupported(without_core())
    if cell.positions is not None:
        raise Unsupported("positions: attention alone gets q and k, which a layer or a model has turned or not")
    module, dtype = build(cell.variant, cell.shape, seed=cell.seed, level=cell.level), getattr(torch, cell.dtype)
    generator = torch.Generator().manual_seed(cell.seed + 2)
    reads = cell.entry.claims(cell.variant, causal=cell.shape.causal).reads
    q, k, v, *gates = draw(cell.inputs, cell.shape, cell.seed, reads)
    drawn = (t.to(cell.device, dtype) for t in (q, k, v))
    inputs = [MemoryWindows.into(t, lambda count: torch.randn(count, generator=generator)) for t in drawn]
    for gate in gates:
        more = partial(_again, gate.flatten(), generator)
        inputs.append(MemoryWindows.into(gate.to(cell.device, accumulator(dtype)), more))
    return module, inputs


def _again(numbers: Tensor, generator: torch.Generator, count: int) -> Tensor:
    return numbers[torch.randint(len(numbers), (count,), generator=generator)]


def _layer(cell: Cell) -> tuple[nn.Module, list[MemoryWindows]]:
    if cell.positions in ("learned", "trained-sinusoid", "sinusoid"):
        raise Unsupported(
            f"positions: a model adds {cell.positions} ones to its tokens, and a layer reads what it gets"
        )
    module = as_layer(cell.variant, cell.shape, seed=cell.seed, rotary=cell.positions == "rotary")
    generator = torch.Generator().manual_seed(cell.seed)
    shape = (cell.shape.B, cell.shape.N, cell.shape.C)
    x = torch.randn(shape, generator=generator).to(cell.device, getattr(torch, cell.dtype))
    return module, [MemoryWindows.into(x, lambda count: torch.randn(count, generator=generator))]


def _model(
    cell: Cell, examples: Callable[[Cell], tuple[Form, Examples]]
) -> tuple[nn.Module, list[MemoryWindows], Tensor | None]:
    size = cell.model or ModelSize()
    if cell.architecture != "encoder":
        return _writing(cell, size)
    labels: Tensor | None = None
    generator = torch.Generator().manual_seed(cell.seed)
    if cell.task is None:
        form = Form((size.vocab,), 2)
        words = torch.randint(size.vocab, (cell.shape.B, cell.shape.N), generator=generator)
    else:
        form, shown = examples(cell)
        words, labels = shown.tokens, shown.labels
    module = Encoder(cell.variant, cell.shape, size, form=form, seed=cell.seed)
    more = lambda count: torch.randint(min(form.vocab), (count,), generator=generator)  # noqa: E731  # as in the others
    return module, [MemoryWindows.into(words.to(cell.device), more, tokens=-1 if len(form.vocab) == 1 else -2)], labels


def _writing(cell: Cell, size: ModelSize) -> tuple[nn.Module, list[MemoryWindows], Tensor]:
    if cell.task is not None:
        raise Unsupported("a task is answered by an encoder; remove the task, or write architecture: encoder")
    generator = torch.Generator().manual_seed(cell.seed)

    def more(count: int) -> Tensor:
        return torch.randint(size.vocab, (count,), generator=generator)

    words = torch.unflatten(more(cell.shape.B * (cell.shape.N + 1)), 0, (cell.shape.B, -1))
    given = [words[:, :-1]]
    make: type[Decoder | EncoderDecoder] = Decoder
    if cell.architecture == "encoder-decoder":
        make = EncoderDecoder
        given.append(torch.unflatten(more(cell.shape.B * cell.shape.M), 0, (cell.shape.B, -1)))
    module = make(cell.variant, cell.shape, size, seed=cell.seed)
    return module, [MemoryWindows.into(one.to(cell.device), more, tokens=-1) for one in given], words[:, 1:]


def _pretrained(cell: Cell, trained: Trained | None) -> tuple[nn.Module, list[MemoryWindows], Tensor]:
    if cell.pretrained is None:
        raise UsageError("level pretrained needs the name of a model; write model: listops in a suite")
    if cell.compile:
        raise Unsupported("compile: the variant is put into a trained model call by call, which is not one graph")
    if trained is None:
        from attnbench.models.pretrained.pretrained_cell import swapped  # only trained models need it

        trained = swapped
    module, text = trained(cell)
    whole, generator = text.tokens.flatten(), torch.Generator().manual_seed(cell.seed)

    def more(count: int) -> Tensor:
        """Random tokens of the text: in order, a later window would repeat an earlier one."""
        return whole[torch.randint(len(whole), (count,), generator=generator)]

    return module, [MemoryWindows.into(text.tokens.to(cell.device), more, tokens=-1)], text.targets


def _allow_cost(cell: Cell) -> None:
    """Refuse time or memory of code that only emulates the variant's method."""
    if cell.variant.name == UNTOUCHED:
        return
    reason = cell.entry.claims(cell.variant, causal=cell.shape.causal).emulated
    if reason and {"time", "memory"} & {*cell.measure}:
        raise Unsupported(f"time and memory: {reason}")


def _allow_decoding(cell: Cell) -> None:
    if cell.level == "model" and cell.architecture == "encoder":
        raise Unsupported("the encoder reads whole sequences; write architecture: decoder, or a lower level")
    if cell.level == "model" and cell.architecture == "encoder-decoder":
        raise Unsupported("variants have no step of cross-attention; write architecture: decoder")
    if cell.pass_ in ("stepwise", "generate") and cell.compile:
        raise Unsupported("compile: each step would be compiled anew for its place; pass: decode compiles one")
    if cell.pass_ == "decode" and cell.new_tokens > cell.shape.N:
        raise Unsupported(f"new_tokens: {cell.new_tokens} in one step are more than all {cell.shape.N}; write fewer")
    if cell.shape.q_start:
        raise Unsupported("q_start: a decoding step has one query, the last token in any case; remove q_start")
    reason = refusal(cell.variant, cell.shape, decode=True, level=cell.level)
    if reason:
        raise Unsupported(reason)
    if cell.state_dtype != "auto" and cell.variant.name != "stack" and cell.entry.traits.meets != "state":
        raise Unsupported(f"state_dtype: {NO_STATE}")


def _answer(cell: Cell, inputs: Sequence[Tensor]) -> Tensor:
    like, shape = inputs[0], cell.shape
    if cell.level == "operator" and (shape.E != shape.D or shape.Q < shape.H):
        return like.new_empty(shape.B, shape.H, like.shape[2], shape.E)
    if shape.query_stride == 1 or cell.level in OF_TOKENS:
        return like
    return like.new_empty(like.shape[0], shape.outputs, like.shape[2])


def _like(cell: Cell, inputs: Sequence[Tensor]) -> Tensor | None:
    if cell.level in OF_TOKENS or cell.pass_ not in ("forward", "stepwise", "generate"):
        return None
    like = _answer(cell, inputs)
    if cell.pass_ != "generate":
        return like
    return like.new_empty(*like.shape[:-2], 1 + cell.new_tokens, like.shape[-1])


def _tokens_kept(cell: Cell, module: nn.Module) -> int | None:
    budgeted = next((part for part in module.modules() if isinstance(part, Budgeted)), None)
    if budgeted is None or cell.pass_ not in ("decode", "generate"):
        return None
    return budgeted.tokens_kept(cell.shape.N - (cell.new_tokens or 1))


def _allow_padding(cell: Cell) -> None:
    if cell.pass_ == "decode":
        if cell.shape.B == 1:
            raise Unsupported("padding: a single sequence has no unequal lengths; write batch: 2 or more")
        if cell.level in OF_TOKENS:
            raise Unsupported("padding: a model's step has one place for all sequences; write level: operator or layer")
        shortest = min(real_tokens(cell.shape.B, cell.shape.N, cell.padding))
        if shortest < cell.new_tokens:
            raise Unsupported(
                f"new_tokens: {cell.new_tokens} in one step are more than the {shortest} of the shortest sequence; "
                "write fewer, or less padding"
            )
        return
    if cell.pass_ in STEPS:
        raise Unsupported(ONE_LENGTH)
    reason = refusal(cell.variant, cell.shape, key_mask=True, level=cell.level)
    if reason:
        raise Unsupported(reason)


def always_compiled(cell: Cell) -> bool:
    """True if the variant is called itself and compiles itself: a layer or a model around it does not."""
    return cell.level == "operator" and cell.entry.claims(cell.variant, causal=cell.shape.causal).compiled


def may_compile(cell: Cell) -> bool:
    """True if a cell's first call may be slow because it compiles: each on a GPU, where kernels are tuned."""
    return cell.device != "cpu" or cell.compile or always_compiled(cell)


@dataclass(frozen=True, slots=True)
class _Made:
    turn: Callable[[int], Any]
    """The arguments of a call, by the number of its inputs."""
    call: Make
    state_bytes: int | None = None
    laps: Laps | None = None
    rollback: Callable[[], Any] | None = None

    def on(self, number: int) -> Callable[[], Any]:
        return self.call(repeat(self.turn(number)))


def _made(
    cell: Cell,
    module: nn.Module,
    inputs: Sequence[MemoryWindows],
    mask: Tensor | None,
    labels: Tensor | None,
    *,
    compiled: bool,
) -> _Made:
    if cell.pass_ in STEPS:
        if cell.pass_ == "generate":
            return _generate(cell, module, inputs)
        return _decode(cell, module, inputs, compiled=compiled) if cell.pass_ == "decode" else _stepwise(module, inputs)
    run: Callable[..., Any] = whole(module) if compiled else module
    if mask is not None:
        run = partial(run, key_mask=mask)
    if cell.pass_ == "forward":
        module.requires_grad_(False)
        return _forward(run, inputs)
    module.train()
    floating = [windows.memory.is_floating_point() for windows in inputs]
    parameters = [t.requires_grad_() for t in module.parameters() if t.is_floating_point()]
    loss = _loss(cell, run, _answer(cell, [windows.at(0) for windows in inputs]), mask, labels)

    def turn(number: int) -> tuple[list[Tensor], list[Tensor]]:
        given = [windows.at(number).requires_grad_(real) for windows, real in zip(inputs, floating, strict=True)]
        return given, [t for t, real in zip(given, floating, strict=True) if real] + parameters

    return _training(loss, turn) if cell.pass_ == "training" else _backward(loss, turn(0))


def _forward(run: Callable[..., Tensor], inputs: Sequence[MemoryWindows]) -> _Made:
    def call(turns: Iterator[Sequence[Tensor]]) -> Callable[[], Tensor]:
        return torch.inference_mode()(lambda: run(*next(turns)))

    return _Made(lambda number: [windows.at(number) for windows in inputs], call)


def _training(
    loss: Callable[[Sequence[Tensor]], Tensor], turn: Callable[[int], tuple[list[Tensor], list[Tensor]]]
) -> _Made:
    def call(turns: Iterator[tuple[list[Tensor], list[Tensor]]]) -> Callable[[], Any]:
        def step() -> Any:
            given, wanted = next(turns)
            return torch.autograd.grad(loss(given), wanted, allow_unused=True)

        return step

    return _Made(turn, call)


def _backward(loss: Callable[[Sequence[Tensor]], Tensor], first: tuple[list[Tensor], list[Tensor]]) -> _Made:
    """Build the graph once, since a second would take its memory again; only the gradient of the loss takes turns."""
    given, wanted = first
    with config.patch(donated_buffer=False):  # compiled code must not reuse memory that the next walk needs again
        value = loss(given)

    def call(turns: Iterator[Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(value, wanted, next(turns), retain_graph=True, allow_unused=True)

    # So few binary digits that any dtype holds them: gradients differ by no more than their scale.
    return _Made(lambda number: torch.full_like(value.detach(), (-1) ** number * (1 + number / 8)), call)


def _parts_of_decoding(cell: Cell) -> list[tuple[slice, slice, slice]]:
    """Sequences of one length, and their tokens before a call of pass decode or, with a kept prefix, generate, and in
    it."""
    B, N = cell.shape.B, cell.shape.N
    count = N - cell.kept_prefix if cell.kept_prefix else cell.new_tokens or 1
    each = [(slice(row, row + 1), end) for row, end in enumerate(real_tokens(B, N, cell.padding))]
    ends = each if cell.padding else [(slice(0, B), N)]
    return [(rows, slice(0, end - count), slice(end - count, end)) for rows, end in ends]


def _decode(cell: Cell, module: nn.Module, inputs: Sequence[MemoryWindows], *, compiled: bool) -> _Made:
    module.requires_grad_(False)
    decoding, parts = cast(Decoding, module), _parts_of_decoding(cell)
    several = cell.new_tokens > 1
    with torch.inference_mode():
        states = [decoding.begin(*(_tokens(x.at(0)[rows], before) for x in inputs)) for rows, before, _ in parts]
        state = joined(module, states) if cell.padding else states[0]
        del states
    step = partial(taken, decoding) if several else decoding.step
    if compiled:
        step = whole(step)

    def call(turns: Iterator[Sequence[Tensor]]) -> Callable[[], Tensor]:
        return torch.inference_mode()(lambda: step(state, *next(turns))[0])

    def turn(number: int) -> list[Tensor]:
        given = [[_tokens(x.at(number)[rows], new) for rows, _, new in parts] for x in inputs]
        return [torch.cat(each) if cell.padding else each[0] for each in given]

    @torch.inference_mode()
    def rollback() -> Any:
        return rolled_back(decoding, state, after, *next(accepted), of=cell.new_tokens)

    if several:
        with torch.inference_mode():
            after = taken(decoding, state, *turn(0))[1]
        half = slice(0, cell.new_tokens // 2)
        accepted = cycle([[_tokens(x, half) for x in turn(number)] for number in range(SEEN)])
    return _Made(turn, call, state_bytes(state), rollback=rollback if several else None)


def _stepwise(module: nn.Module, inputs: Sequence[MemoryWindows]) -> _Made:
    module.requires_grad_(False)
    decoding = cast(Decoding, module)

    def call(turns: Iterator[Sequence[Tensor]]) -> Callable[[], Tensor]:
        @torch.inference_mode()
        def run() -> Tensor:
            given = next(turns)
            count = given[0].shape[1 if given[0].dim() == 2 else -2]
            state = decoding.begin(*(_tokens(x, slice(0, 0)) for x in given))
            outputs: Tensor | None = None
            for t in range(count):
                output, state = decoding.step(state, *(_tokens(x, slice(t, t + 1)) for x in given))
                if outputs is None:
                    outputs = output.new_empty(*output.shape[:-2], count, output.shape[-1])
                outputs[..., t : t + 1, :] = output
            assert outputs is not None
            return outputs

        return run

    return _Made(lambda number: [windows.at(number) for windows in inputs], call)


def _generate(cell: Cell, module: nn.Module, inputs: Sequence[MemoryWindows]) -> _Made:
    """A prompt in one call, then a step for each new token: outputs of the prompt's last token and of the new ones.

    With a kept prefix a step takes the rest of the prompt from its state, which is there before all calls.
    """
    module.requires_grad_(False)
    decoding, prompt, laps = cast(Decoding, module), cell.shape.N - cell.new_tokens, Laps(cell.device)
    with torch.inference_mode():
        first = [_tokens(windows.at(0), slice(0, prompt)) for windows in inputs]
        prefix = known(module, cell.kept_prefix, *first) if cell.kept_prefix else None
        state_behind = state_bytes(decoding.begin(*first))

    def turn(number: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        given = [windows.at(number) for windows in inputs]
        tokens = [[_tokens(x, slice(t, t + 1)) for x in given] for t in range(prompt, cell.shape.N)]
        return [_tokens(x, slice(cell.kept_prefix, prompt)) for x in given], tokens

    def call(turns: Iterator[tuple[list[Tensor], list[list[Tensor]]]]) -> Callable[[], Tensor]:
        @torch.inference_mode()
        def run() -> Tensor:
            asked, tokens = next(turns)
            start = laps.moment()
            choose_products(of_one_row=False)
            output, state = behind(module, prefix, *asked) if cell.kept_prefix else answered(module, *asked)
            outputs = [output[..., -1:, :].clone()]  # a view would keep all of them
            choose_products(of_one_row=True)
            middle = laps.moment()
            for token in tokens:
                output, state = decoding.step(state, *token)
                outputs.append(output)
            output = torch.cat(outputs, -2)
            laps.add(start, middle, laps.moment())
            return output

        return run

    return _Made(turn, call, state_behind, laps)


def _tokens(x: Tensor, which: slice) -> Tensor:
    """Some of the tokens: whole numbers ``(B, N)`` of a model, or vectors ``(..., N, width)``."""
    return x[:, which] if x.dim() == 2 else x[..., which, :]


def _loss(
    cell: Cell, run: Callable[..., Tensor], like: Tensor, mask: Tensor | None, labels: Tensor | None
) -> Callable[[Sequence[Tensor]], Tensor]:
    """A scalar to differentiate, without padded tokens: cross-entropy for the model, else a fixed random projection."""
    generator = torch.Generator().manual_seed(cell.seed + 1)
    device = torch.device(cell.device)
    if cell.level in OF_TOKENS:
        answers = torch.randint(2, (cell.shape.B,), generator=generator) if labels is None else labels
        if mask is not None and cell.architecture == "decoder":
            answers = answers.masked_fill(~mask.to(answers.device), NO_LABEL)
        answers = answers.to(device)
        return lambda inputs: cross_entropy(run(*inputs).float(), answers)
    direction = torch.randn(like.shape, generator=generator).to(device, like.dtype)
    if mask is not None and not cell.shape.cross:
        mask = remaining(mask, cell.shape.query_stride)
        assert mask is not None
        direction = direction * (mask[:, None, :, None] if like.ndim == 4 else mask[:, :, None])
    return lambda inputs: torch.sum(run(*inputs) * direction)
