"""Pages: handed out once, shared by count, given back by the last user."""

import pytest
import torch

from ullage.rollout.embedded.pages import Pages, pages_for


def make_pages(count=4):
    return Pages(torch.zeros(2, 2, count + 1, 16, 1, 3))


def test_take_hands_out_each_page_once():
    pages = make_pages()
    assert pages.take(3) == [0, 1, 2]
    assert pages.take(0) == []
    assert pages.free == 1
    assert pages.take(1) == [3]
    assert pages.free == 0


def test_take_more_than_there_are_is_a_bug():
    with pytest.raises(AssertionError, match="admission must reserve"):
        make_pages().take(5)


def test_a_shared_page_is_free_after_its_last_user():
    pages = make_pages()
    taken = pages.take(2)
    pages.share(taken[:1])
    pages.give_back(taken)
    assert pages.free == 3
    pages.give_back(taken[:1])
    assert pages.free == 4
    assert sorted(pages.take(4)) == [0, 1, 2, 3]


def test_copy_copies_keys_and_values_of_every_layer():
    arena = torch.arange(2 * 2 * 3 * 16 * 3, dtype=torch.float32).view(2, 2, 3, 16, 1, 3)
    address = arena.data_ptr()
    pages = Pages(arena.clone())
    pages.copy([0], [1])
    assert torch.equal(pages.arena[:, :, 1], arena[:, :, 0])
    assert torch.equal(pages.arena[:, :, 0], arena[:, :, 0])
    assert arena.data_ptr() == address


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens) == pages
