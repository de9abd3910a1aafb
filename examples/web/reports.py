"""The service behind the front: a report whose sections a peer writes. It tells of each section as it comes in."""

import asyncio

from coatcheck.worker import App, Context

TITLES = ("Summary", "Habitat", "Anatomy", "Behaviour", "Outlook")

app = App("reports")
sections = App("sections")


@app.task
async def report(ctx: Context, topic: str) -> dict[str, str]:
    """Ask for all sections at once; each answer resumes the task, moves the bar, and puts it down again."""
    ctx.progress(0, len(TITLES), "asked for the sections")
    calls = [ctx.call("sections", {"topic": topic, "title": title}, timeout=60) for title in TITLES]
    written: dict[str, str] = {}
    for next_one in asyncio.as_completed(calls):
        section = await next_one
        written[section["title"]] = section["text"]
        ctx.progress(len(written), len(TITLES), f"{section['title']} is written")
    return {title: written[title] for title in TITLES}


@sections.task
async def section(ctx: Context, topic: str, title: str) -> dict[str, str]:
    """Take a while, a little longer for each section than for the one before."""
    await asyncio.sleep(0.5 * (1 + TITLES.index(title)))
    return {"title": title, "text": f"{title} of {topic}: to be continued."}
