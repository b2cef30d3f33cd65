from ullage.data.arithmetic import one_digit_sums


def problems(rows):
    return [tuple(int(part) for part in row["prompt"].removesuffix(" = ").split(" + ")) for row in rows]


def test_split_covers_every_sum_once_and_keeps_both_orders_together():
    train, held_out = one_digit_sums(seed=1)
    assert sorted(problems(train) + problems(held_out)) == [(a, b) for a in range(1, 10) for b in range(1, 10)]
    assert not {frozenset(pair) for pair in problems(train)} & {frozenset(pair) for pair in problems(held_out)}
    assert len({frozenset(pair) for pair in problems(held_out)}) == 11  # a quarter of 45 pairs


def test_answers():
    for rows in one_digit_sums(seed=2):
        assert [row["answer"] for row in rows] == [str(a + b) for a, b in problems(rows)]


def test_split_depends_on_the_seed_alone():
    assert one_digit_sums(seed=1) == one_digit_sums(seed=1)
    assert one_digit_sums(seed=1)[1] != one_digit_sums(seed=2)[1]


def test_format_and_range():
    train, held_out = one_digit_sums(seed=1, smallest=0, largest=1, held_out_fraction=0, prompt_format="Q: {a}+{b}? A:")
    assert held_out == []
    assert [row["prompt"] for row in train] == ["Q: 0+0? A:", "Q: 0+1? A:", "Q: 1+0? A:", "Q: 1+1? A:"]
