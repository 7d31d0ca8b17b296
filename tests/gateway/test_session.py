"""The token ledger, case by case."""

from shoal.gateway.conversation import Conversation, minted_id
from shoal.gateway.token_tree import Cause, Generation, TokenTree
from shoal.types import Completion, FinishReason, Message, Role, ToolCall

END = 9
ASK = Message(Role.USER, "go")
MORE = Message(Role.USER, "more")


def drawn(*tokens: int, finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(tokens, (-0.5,) * len(tokens), (0,) * len(tokens), finish)


def answered(tree: TokenTree, messages: tuple[Message, ...], completion: Completion, answer: Message) -> Generation:
    attachment = tree.attach(Conversation(messages))
    rendered = () if attachment.continues else (END, 1, 2) if attachment.cause is None else (1, 2)
    return tree.commit(tree.open(attachment, rendered, repr(messages)), completion, answer)


def said(text: str, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, text, calls)


def test_the_close_that_the_engine_drew_is_not_written_again() -> None:
    tree = TokenTree()
    answered(tree, (ASK,), drawn(5, END), said("x"))
    second = answered(tree, (ASK, said(" x "), MORE), drawn(6, END), said("y"))
    assert tree.prompt_ids(second) == (1, 2, 5, END, 1, 2)


def test_the_close_of_an_answer_cut_short_is_written_and_not_trained() -> None:
    tree = TokenTree()
    answered(tree, (ASK,), drawn(5, finish=FinishReason.LENGTH), said("x"))
    second = answered(tree, (ASK, said("x"), MORE), drawn(6, END), said("y"))
    assert tree.prompt_ids(second) == (1, 2, 5, END, 1, 2)
    assert second.rendered_ids == (END, 1, 2)


def test_a_continuation_goes_on_where_the_answer_was_cut() -> None:
    tree = TokenTree()
    answered(tree, (ASK,), drawn(5, finish=FinishReason.LENGTH), said("x"))
    second = answered(tree, (ASK, said("x")), drawn(6, END), said("y"))
    assert tree.prompt_ids(second) == (1, 2, 5)
    assert tree.messages() == (ASK, said("xy"))
    third = tree.attach(Conversation((ASK, said("xy"), MORE)))
    parts = tree.attach(Conversation((ASK, said("x"), said("y"), MORE)))
    assert third.parent == parts.parent == second.id


def test_other_tools_or_an_edited_question_begin_a_new_root() -> None:
    tree = TokenTree()
    answered(tree, (ASK,), drawn(5, END), said("x"))
    assert tree.attach(Conversation((ASK, said("x"), MORE), tools="[1]")).cause is Cause.DIVERGED
    assert tree.attach(Conversation((MORE, said("x"), MORE))).cause is Cause.DIVERGED


def test_arguments_are_compared_as_json_and_ids_tell_twins_apart() -> None:
    tree = TokenTree()
    first = answered(tree, (ASK,), drawn(5, END), said("", ToolCall("a", "f", '{"x": 1, "y": 2}')))
    second = answered(tree, (ASK,), drawn(6, END), said("", ToolCall("b", "f", '{"x": 1, "y": 2}')))
    for one, generation in (("a", first), ("b", second), ("other", second)):
        quoted = said("", ToolCall(one, "f", '{"y":2,"x":1}'))
        assert tree.attach(Conversation((ASK, quoted, MORE))).parent == generation.id


def test_arguments_that_are_no_json_are_compared_as_they_are() -> None:
    tree = TokenTree()
    broken = answered(tree, (ASK,), drawn(5, END), said("", ToolCall("a", "f", '{"x": ')))
    assert tree.attach(Conversation((ASK, said("", ToolCall("a", "f", '{"x": ')), MORE))).parent == broken.id
    assert tree.attach(Conversation((ASK, said("", ToolCall("a", "f", '{"x":')), MORE))).parent is None


def test_arguments_of_any_depth_are_compared() -> None:
    tree, deep = TokenTree(), '{"a":' * 5000 + "1" + "}" * 5000
    first = answered(tree, (ASK,), drawn(5, END), said("", ToolCall("a", "f", deep)))
    assert tree.attach(Conversation((ASK, said("", ToolCall("a", "f", deep)), MORE))).parent == first.id


def test_a_call_is_under_way_until_its_generation_is_there() -> None:
    tree = TokenTree()
    call = tree.open(tree.attach(Conversation((ASK,))), (1, 2), "digest")
    assert (tree.calls, tree.generations) == ({call.id: call}, ())
    generation = tree.commit(call, drawn(5, END), said("x"))
    assert (tree.calls, tree.generations) == ({}, (generation,))


def test_what_no_client_got_is_left_out_when_an_equal_request_was_answered() -> None:
    tree = TokenTree()
    lost = answered(tree, (ASK,), drawn(5, END), said("x"))
    assert tree.exported() == [lost]
    again = answered(tree, (ASK,), drawn(6, END), said("y"))
    tree.deliver(again.id)
    assert tree.exported() == [again]


def test_a_retry_finds_the_call_under_way_and_then_its_answer() -> None:
    tree = TokenTree()
    call = tree.open(tree.attach(Conversation((ASK,))), (1, 2), "digest")
    assert tree.retried("digest") is call
    generation = tree.commit(call, drawn(5, END), said("x"))
    assert tree.retried("digest") is generation
    assert tree.retried("other") is None


def test_minted_ids_are_nine_letters_and_digits_and_differ() -> None:
    ids = {minted_id("s", generation, index) for generation in range(50) for index in range(4)}
    assert len(ids) == 200
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_tree_is_cut_while_its_newest_answer_is() -> None:
    tree = TokenTree()
    assert not tree.is_cut
    answered(tree, (ASK,), drawn(5, finish=FinishReason.LENGTH), said("x"))
    assert tree.is_cut
    answered(tree, (ASK, said("x")), drawn(6, END), said("y"))
    assert not tree.is_cut


def test_an_answer_that_the_client_begins_with_a_cut_one_goes_on_there_and_counts_its_tokens() -> None:
    tree = TokenTree()
    first = answered(tree, (ASK,), drawn(5, 6, finish=FinishReason.LENGTH), said("x"))
    on = tree.attach(Conversation((ASK,), begun="x"))
    assert (on.parent, on.continues, tree.begun_tokens(on)) == (first.id, True, 2)
    second = tree.commit(tree.open(on, (), "on"), drawn(7, finish=FinishReason.LENGTH), said("y"))
    further = tree.attach(Conversation((ASK,), begun="xy"))
    assert (further.parent, further.continues, tree.begun_tokens(further)) == (second.id, True, 3)
    other = tree.attach(Conversation((ASK,), begun="z"))
    assert (other.continues, tree.begun_tokens(other)) == (False, 0)
