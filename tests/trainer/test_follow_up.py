"""What an environment says, as the tokens that the chat template puts after an answer."""

import pytest

from make_tiny_model import make_tokenizer
from ullage.base.errors import ConfigError
from ullage.config.tree import Data
from ullage.data.prompts import Prompt
from ullage.trainer.episodes import FollowUp

EOS = 2
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "<|>asistnueroltm?\n0123=[]"


def chat(*messages):
    return Prompt(id=0, token_ids=(1,), prompt=list(messages), target=None, source="s", extra={})


def make_follow_up(template, **data):
    tokenizer = make_tokenizer(LETTERS)
    tokenizer.chat_template = template
    return FollowUp(tokenizer, Data.model_validate(data)), tokenizer


def said(follow_up, tokenizer, observation, end=EOS, prompt=None):
    prompt = prompt or chat({"role": "user", "content": "?"})
    return tokenizer.decode(follow_up.token_ids(prompt, observation, end))


def test_the_template_continues_after_the_end_token_that_was_sampled():
    follow_up, tokenizer = make_follow_up(CHATML)
    assert said(follow_up, tokenizer, "12") == "\n<|user|>12<eos>\n<|assistant|>"
    tools = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "0"}]
    assert said(follow_up, tokenizer, tools) == "\n<|tool|>3<eos>\n<|tool|>0<eos>\n<|assistant|>"


def test_the_whole_conversation_is_what_the_template_would_have_rendered():
    follow_up, tokenizer = make_follow_up(CHATML)
    messages = [{"role": "user", "content": "0?"}]
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer("12")["input_ids"], EOS]
    followed = follow_up.token_ids(chat(*messages), "31", EOS)
    messages += [{"role": "assistant", "content": "12"}, {"role": "user", "content": "31"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert [*opened, *answer, *followed] == whole


def test_how_the_template_closes_an_answer_is_rendered_once(monkeypatch):
    follow_up, tokenizer = make_follow_up(CHATML)
    rendered, render = [], tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda chat, **options: rendered.append(len(chat)) or render(chat, **options)
    )
    for observation in ("1", "2", "3"):
        assert said(follow_up, tokenizer, observation) == f"\n<|user|>{observation}<eos>\n<|assistant|>"
    assert sorted(rendered) == [2, 3, 3, 3]


def test_an_answer_that_ended_with_another_token_is_closed_by_the_template():
    follow_up, tokenizer = make_follow_up(CHATML)
    other_end = tokenizer.convert_tokens_to_ids("<bos>")
    assert said(follow_up, tokenizer, "1", end=other_end) == "<eos>\n<|user|>1<eos>\n<|assistant|>"


def test_an_observation_with_an_end_token_in_it():
    follow_up, tokenizer = make_follow_up("{% for m in messages %}[{{ m.content }}]{% endfor %}=")
    assert said(follow_up, tokenizer, "<eos>") == "][<eos>]="


def test_plain_prompts_get_plain_text():
    follow_up, tokenizer = make_follow_up(CHATML)
    plain = Prompt(id=0, token_ids=(1,), prompt="12", target=None, source="s", extra={})
    assert said(follow_up, tokenizer, "31", prompt=plain) == "31"
    messages = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "0"}]
    assert said(follow_up, tokenizer, messages, prompt=plain) == "3\n0"
    always, tokenizer = make_follow_up(CHATML, apply_chat_template="always")
    assert said(always, tokenizer, "31", prompt=plain) == "\n<|user|>31<eos>\n<|assistant|>"


def test_options_of_the_template_are_kept():
    follow_up, tokenizer = make_follow_up(CHATML + "{{ ending }}", apply_chat_template_kwargs={"ending": "33"})
    assert said(follow_up, tokenizer, "1") == "\n<|user|>1<eos>\n<|assistant|>33"


def test_a_template_that_forgets_answers_is_refused():
    follow_up, _ = make_follow_up("{{ messages[0].content }}=")
    with pytest.raises(ConfigError, match="leaves out an earlier answer") as refused:
        follow_up.check([chat({"role": "user", "content": "?"})])
    assert "custom_chat_template" in refused.value.remedy
    follow_up.check([Prompt(id=0, token_ids=(1,), prompt="12", target=None, source="s", extra={})])
