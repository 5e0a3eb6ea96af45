"""A chat's memory, commands and screen, without a server."""

import io

import pytest
from rich.console import Console

from client.chat.commands import HELP, Commands, End
from client.chat.conversation import Conversation
from client.chat.screen import MarkdownView, PlainView
from client.chat.session import ChatSession
from client.target import Target


def test_what_is_asked() -> None:
    chat = Conversation("m", "be brief", {"temperature": 0})
    first = chat.ask("a")
    assert first["messages"] == [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "a"},
    ]  # fmt: skip
    assert first["stream"] and first["temperature"] == 0 and first["model"] == "m"
    chat.take("b")
    assert [m["content"] for m in chat.ask("c")["messages"]] == ["be brief", "a", "b", "c"]
    assert chat.take_back() == "c" and chat.take_back() == "a" and chat.take_back() is None


def test_settings_are_json_or_text() -> None:
    chat = Conversation("m")
    for name, value in [("stop", '["x"]'), ("seed", "7"), ("reasoning_effort", "low")]:
        chat.set(name, value)
    assert chat.settings == {"stop": ["x"], "seed": 7, "reasoning_effort": "low"}
    chat.set("seed", "")
    assert "seed" not in chat.settings
    for name in ("messages", "stream", "a b", ""):
        with pytest.raises(ValueError, match="cannot be set"):
            chat.set(name, "1")


def said_by(chat: Conversation, *lines: str) -> tuple[list[str], str | None]:
    """What commands say, and what the last of them asks."""
    said: list[str] = []
    commands, asks = Commands(chat, said.append), None
    for line in lines:
        asks = commands.run(line)
    return said, asks


def test_commands() -> None:
    chat = Conversation("m")
    said, _ = said_by(chat, "/system be kind", "/set top_p 0.5", "/set n 2", "/help", "/nothing")
    assert chat.system == "be kind" and chat.settings == {"top_p": 0.5}
    assert said[:2] == ["System prompt: be kind", "Settings: top_p 0.5"]
    assert "'n' cannot be set" in said[2] and said[3] == HELP and "no /nothing" in said[4]
    said, _ = said_by(chat, "/system -", "/set top_p", "/set")
    assert said == ["System prompt: none"] + ["Settings: all as the server likes"] * 2
    assert said_by(chat, "/retry") == (["Nothing was asked yet."], None)
    chat.ask("why?")
    chat.take("so")
    assert said_by(chat, "/retry") == ([], "why?") and chat.messages == []
    chat.ask("why?")
    said_by(chat, "/reset")
    assert chat.messages == []
    for line in ("/exit", "/quit"):
        with pytest.raises(End):
            said_by(chat, line)


def test_every_command_is_in_the_help() -> None:
    for name in ("reset", "system", "set", "retry", "help", "exit"):
        assert f"/{name}" in HELP


def terminal(height: int = 10) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=40, height=height, color_system=None,
        legacy_windows=False, get_time=iter(range(10**6)).__next__,
    )  # fmt: skip


def lasting(console: Console) -> str:
    """What stays on the screen: a line that is erased later does not."""
    assert isinstance(console.file, io.StringIO)
    shown: list[str] = [""]
    text = console.file.getvalue().replace("\x1b[?25l", "").replace("\x1b[?25h", "")
    while text:
        if text.startswith("\x1b[1A"):
            text = text[4:]
            shown.pop()
        elif text.startswith("\x1b[2K"):
            text = text[4:]
            shown[-1] = ""
        elif text[0] == "\r":
            text = text[1:]
        elif text[0] == "\n":
            text = text[1:]
            shown.append("")
        else:
            shown[-1] += text[0]
            text = text[1:]
    return "\n".join(line.rstrip() for line in shown).strip()


def test_an_answer_longer_than_the_screen_is_shown_once() -> None:
    console, text = terminal(), ""
    with MarkdownView(console) as view:
        for number in range(60):
            text += f"{number}. word\n"
            view.show("thinking", text)
    lines = lasting(console).splitlines()
    assert [line.split()[0] for line in lines if "word" in line] == [str(n) for n in range(60)]
    assert lines[0] == "thinking"


def test_markdown_is_shown_as_such() -> None:
    console = terminal()
    with MarkdownView(console) as view:
        view.show("", "# Title\n\nSome **bold** words.\n\n```python\nx = 1\n")
    shown = lasting(console)
    assert "**" not in shown and "```" not in shown and "bold words." in shown and "x = 1" in shown


def test_what_a_model_says_is_no_markup() -> None:
    console = terminal()
    with MarkdownView(console) as view:
        view.show("[bold]r[/bold]", "[red]c[/red] \x1b[31mescape")
    shown = lasting(console)
    assert "[bold]r[/bold]" in shown and "[red]c[/red]" in shown and "\x1b[31m" not in shown


def test_plain_text_is_shown_as_it_is() -> None:
    out = io.StringIO()
    with PlainView(Console(file=out)) as view:
        view.show("", "**a")
        view.show("hm", "**a** [b]")
    assert out.getvalue() == "**a** [b]\n"


def test_a_server_that_is_not_there_costs_the_question_alone() -> None:
    console, lines = terminal(), iter(["hello", "/exit"])
    chat = Conversation("m")
    target = Target("http://127.0.0.1:9", "m")
    assert not ChatSession(target, chat, console, lambda _: next(lines), markdown=True).run()
    assert chat.messages == [] and "refused" in lasting(console)


def test_output_for_another_program_holds_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    lines, console = iter(["hello", "/exit"]), Console(file=io.StringIO())
    target = Target("http://127.0.0.1:9", "m")
    ChatSession(target, Conversation("m"), console, lambda _: next(lines), markdown=False).run()
    assert isinstance(console.file, io.StringIO) and not console.file.getvalue().strip()
    assert "refused" in capsys.readouterr().err


def test_the_end_of_the_input_is_the_end() -> None:
    lines = ["/system a\\", "b", KeyboardInterrupt, "/system"]

    def read(_prompt: str) -> str:
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    chat, console = Conversation("m"), terminal()
    assert ChatSession(Target("http://127.0.0.1:9", "m"), chat, console, read, markdown=True).run()
    assert chat.system == "a\nb" and lines == []
