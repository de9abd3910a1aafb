"""Hello: the smallest service that waits, and the peer it waits for.

    python -m examples.hello Ada Grace

`hello` asks its peer for all names at once. Look at its one `await`: there the task is put down, and is a row in
Postgres until the last answer arrives. `greeter` is a service too; it never waits, so it needs no row.
"""

from coatcheck.worker import App, Context

app = App("hello")
greeter = App("greeter")


@app.task
async def hello(ctx: Context, names: list[str]) -> list[str]:
    return await ctx.gather(*(ctx.call("greeter", name, timeout=30) for name in names))


@greeter.task
async def greet(ctx: Context, name: str) -> str:
    return f"Hello, {name}!"
