"""Written arithmetic: `+`, `-` and `*` by one digit, with steps a tiny transformer can follow.

Two whole numbers and an operator come in, the text of the steps and of the answer go out. Every
line restates the digits it uses, so that no line needs more than a table look-up and copying. It
knows nothing of chat format or tokens.
"""

from __future__ import annotations

import random
import zlib

OPERATORS = ("+", "-", "*")
_COLUMNS = "abcdefgh"  # column labels, lowest digit first


def reserved(key: str) -> bool:
    """True for the sixteenth of all questions that belongs to evaluation, never to training."""
    return zlib.crc32(key.encode()) % 16 == 0


def steps(op: str, a: int, b: int) -> tuple[str, str]:
    """(text of the steps, answer text) for `a op b`; `*` needs one operand below 10."""
    if op == "+":
        return _add(a, b)
    if op == "-":
        return _subtract(a, b)
    return _multiply(a, b)


def _pad(a: int, b: int) -> tuple[str, str]:
    n = max(len(str(a)), len(str(b)))
    return f"{a:0{n}d}", f"{b:0{n}d}"


def _drop_zeros(digits: str) -> tuple[list[str], str]:
    """One line for each leading zero that goes."""
    lines = []
    while len(digits) > 1 and digits[0] == "0":
        digits = digits[1:]
        lines.append(f"drop 0: {digits}")
    return lines, digits


def _add(a: int, b: int) -> tuple[str, str]:
    x, y = _pad(a, b)
    lines, carry, done = [f"{x} + {y}"], 0, ""
    for label, p, q in zip(_COLUMNS, reversed(x), reversed(y), strict=False):
        total = int(p) + int(q) + carry
        done = f"{total % 10}{done}"
        lines.append(f"{label} {p}+{q}+{carry}={total} carry {total // 10}: {done}")
        carry = total // 10
    if carry:
        done = f"{carry}{done}"
    lines.append(f"carry {carry}: {done}")
    lines.append(f"plus: {done}")
    return "\n".join(lines) + "\n", done


def _subtract(a: int, b: int) -> tuple[str, str]:
    x, y = _pad(a, b)
    lines = [f"{x} - {y}"]
    compared, swap = [], False
    for p, q in zip(x, y, strict=True):
        if p == q:
            compared.append(f"{p}={q}")
            continue
        swap = p < q
        compared.append(f"{p}{'<' if swap else '>'}{q}")
        break
    lines.append(f"top {' '.join(compared)} {'swap' if swap else 'keep'}")
    if swap:
        x, y = y, x
    lines.append(f"{x} - {y}")
    borrow, done = 0, ""
    for label, p, q in zip(_COLUMNS, reversed(x), reversed(y), strict=False):
        value = int(p) - int(q) - borrow
        lent = int(value < 0)
        done = f"{value + 10 * lent}{done}"
        lines.append(f"{label} {p}-{q}-{borrow}={value + 10 * lent} borrow {lent}: {done}")
        borrow = lent
    zeros, digits = _drop_zeros(done)
    answer = f"-{digits}" if swap else digits
    lines += [*zeros, f"{'swap' if swap else 'keep'}: {answer}"]
    return "\n".join(lines) + "\n", answer


def _multiply(a: int, b: int) -> tuple[str, str]:
    if b > 9:
        a, b = b, a
    lines, carry, done = [f"{a} * {b}"], 0, ""
    for label, p in zip(_COLUMNS, reversed(str(a)), strict=False):
        product = int(p) * b
        total = product + carry
        done = f"{total % 10}{done}"
        lines.append(f"{label} {p}*{b}={product}+{carry}={total} carry {total // 10}: {done}")
        carry = total // 10
    if carry:
        done = f"{carry}{done}"
    lines.append(f"carry {carry}: {done}")
    zeros, answer = _drop_zeros(done)
    lines += [*zeros, f"times: {answer}"]
    return "\n".join(lines) + "\n", answer


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def draw(rng: random.Random, op: str, digits: int | None = None) -> tuple[int, int]:
    """Operands for `op`; `digits` fixes their length (of the longer one for `*`).

    Half of the subtractions share leading digits, so that equal digits, swaps, zeros to drop and
    long borrow chains are common.
    """
    n = digits or rng.choices((1, 2, 3, 4, 5), (8, 18, 46, 18, 10))[0]
    a = _number(rng, n)
    if op == "*":
        pair = [a, rng.randrange(10)]
        if digits is None and rng.random() < 0.25:
            pair.reverse()
        return pair[0], pair[1]
    m = n
    if digits is None and rng.random() < 0.3:
        m = rng.choices((1, 2, 3, 4, 5), (10, 25, 35, 20, 10))[0]
    b = _number(rng, m)
    if digits is None and op == "-" and m == n and rng.random() < 0.5:
        shared = rng.randrange(1, n + 1)
        tail = n - shared
        b = a if tail == 0 else a - a % 10**tail + rng.randrange(10**tail)
        if tail == 0 and rng.random() < 0.7:
            b = max(0, a + rng.choice((-3, -2, -1, 1, 2, 3)))
    if digits is None and rng.random() < 0.5:
        a, b = b, a
    return a, b


def problem(rng: random.Random, op: str, held: bool, digits: int | None = None) -> tuple[int, int]:
    """Operands whose question is reserved for evaluation iff `held`."""
    while True:
        a, b = draw(rng, op, digits)
        if reserved(f"{a}{op}{b}") == held:
            return a, b
