"""A plan as one HTML file without scripts: memory over the step, bytes on links, the schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from deepspeed.config.memory import size_text
from deepspeed.pipe.schedule.actions import PassKind
from deepspeed.pipe.schedule.simulate import Timeline
from deepspeed.planning.planner import Plan
from deepspeed.planning.trace import KINDS, MemoryMoment

_COLOURS = (
    *("#3b76c4", "#7fb0e8", "#2a4f80", "#d9622b", "#8d5bb5", "#b99bd6"),
    *("#999999", "#4aa5a8", "#4c9a52", "#b3923b", "#c25a7c"),
)
_WIDTH, _HEIGHT, _BAR = 960, 300, 22
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font-size: 12px; }
table { border-collapse: collapse; } td, th { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; vertical-align: top; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; }
"""


def page(plan: Plan) -> str:
    """The whole file."""
    title = f"Plan of rank {plan.largest.place.rank} of {plan.cluster.world}"
    parts = [f"<h1>{title}</h1>", _summary(plan), "<h2>Memory of the device over a step</h2>", _memory(plan)]
    if plan.collectives:
        parts += ["<h2>Bytes that a rank sends in a step</h2>", _links(plan)]
    if plan.time is not None:
        parts += ["<h2>Time of a step</h2>", _timeline(plan)]
    parts += ["<h2>Assumed</h2>", "<ul>", *(f"<li>{escape(text)}</li>" for text in plan.assumed), "</ul>"]
    return document(title, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A file of its own, light or dark as the reader's system is, without scripts."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n'


def _summary(plan: Plan) -> str:
    limit = plan.cluster.limit
    said = "" if limit is None else f" of {size_text(limit)}: {'fits' if plan.fits else 'does not fit'}"
    rows = "".join(
        f'<tr><td><span class="key" style="background:{_colour(kind)}"></span>{escape(kind)}</td>'
        f"<td>{size_text(nbytes)}</td></tr>"
        for kind, nbytes in plan.kinds.items()
    )
    return f"<p>Peak {size_text(plan.peak)}{said}</p><table>{rows}</table>"


def _colour(kind: str) -> str:
    return _COLOURS[KINDS.index(kind)] if kind in KINDS else "#555555"


def _memory(plan: Plan) -> str:
    """Areas of the kinds on top of each other, a point for each module that runs."""
    moments = plan.largest.moments
    most = max((sum(moment.kinds.values()) for moment in moments), default=0) or 1
    below = [0.0] * len(moments)
    areas = []
    for kind in KINDS:
        above = [low + moment.kinds[kind] for low, moment in zip(below, moments, strict=True)]
        if above != below:
            edge = [*_points(above, most), *reversed(list(_points(below, most)))]
            areas.append(f'<polygon fill="{_colour(kind)}" points="{" ".join(edge)}"><title>{kind}</title></polygon>')
        below = above
    labels = [f'<text x="4" y="14">{size_text(round(most))}</text>', *_phases(moments)]
    return picture(_HEIGHT + 20, "memory by kind over the step", [*areas, *labels])


def _points(values: Sequence[float], most: float) -> Iterator[str]:
    step = _WIDTH / max(len(values) - 1, 1)
    return (f"{place * step:.1f},{_HEIGHT - value / most * (_HEIGHT - 20):.1f}" for place, value in enumerate(values))


def _phases(moments: Sequence[MemoryMoment]) -> Iterator[str]:
    """Where a phase begins."""
    before, free = None, -1.0
    for place, moment in enumerate(moments):
        at = place * _WIDTH / max(len(moments) - 1, 1)
        if moment.phase != before and at > free:
            yield f'<text x="{at:.1f}" y="{_HEIGHT + 14}">{escape(moment.phase)}</text>'
            free = at + 80
        before = moment.phase


def _links(plan: Plan) -> str:
    """A bar for every axis: within nodes, and between nodes behind it."""
    axes: dict[str, tuple[float, float]] = {}
    for each in plan.collectives:
        within, between = axes.get(each.axis, (0.0, 0.0))
        axes[each.axis] = within + each.count * each.links.within, between + each.count * each.links.between
    most = max((sum(sizes) for sizes in axes.values()), default=0.0) or 1.0
    marks = []
    for row, (axis, (within, between)) in enumerate(axes.items()):
        y, near, far = row * (_BAR + 8), within / most * 560, between / most * 560
        said = f"{size_text(round(within))} within nodes, {size_text(round(between))} between"
        marks += [
            f'<text x="0" y="{y + 15}">{escape(axis)}</text>',
            f'<rect x="90" y="{y}" width="{near:.1f}" height="{_BAR}" fill="{_COLOURS[0]}"/>',
            f'<rect x="{90 + near:.1f}" y="{y}" width="{far:.1f}" height="{_BAR}" fill="{_COLOURS[2]}"/>',
            f'<text x="{96 + near + far:.1f}" y="{y + 15}">{said}</text>',
        ]
    return picture(len(axes) * (_BAR + 8), "bytes by axis", marks)


def _timeline(plan: Plan) -> str:
    """Phases one after the other; what is sent concurrently below."""
    time = plan.time
    assert time is not None, "drawn with a device only"
    scale, at, marks = _WIDTH / (time.total or 1.0), 0.0, list[str]()
    for phase in time.phases:
        computes, exposed = phase.computes * scale, phase.exposed * scale
        hidden = min((phase.sends - phase.exposed) * scale, computes)
        marks += [
            _block(at, 0, computes, _COLOURS[7], f"{phase.phase} computes"),
            _block(at + computes, 0, exposed, _COLOURS[2], f"{phase.phase} waits for links"),
            _block(at + computes - hidden, _BAR + 4, hidden + exposed, _COLOURS[1], f"{phase.phase} sends"),
            f'<text x="{at + 3:.1f}" y="{2 * _BAR + 22}">{phase.phase} {phase.total * 1e3:.2f} ms</text>',
        ]
        at += computes + exposed
    marks.append(_block(at, 0, time.bubble * scale, _COLOURS[5], "waits for other stages"))
    caption = f"<p>{time.total * 1e3:.2f} ms, {time.utilization:.0%} of the device's peak (MFU)</p>"
    drawn = caption + picture(2 * _BAR + 28, "phases of a step", marks)
    return drawn if time.timeline is None else drawn + _lanes(time.timeline)


_PASSES = {PassKind.FORWARD: 0, PassKind.BACKWARD: 3, PassKind.INPUT: 3, PassKind.WEIGHT: 8}
"""Their colours."""


def _lanes(timeline: Timeline) -> str:
    """What each rank of a pipeline computes, and where it waits."""
    scale, marks = (_WIDTH - 60) / (timeline.length or 1.0), list[str]()
    for rank, row in enumerate(timeline.spans):
        y = rank * (_BAR + 4)
        marks.append(f'<text x="0" y="{y + 15}">stage {rank}</text>')
        for kind in PassKind:
            spans = [(60 + begin * scale, (end - begin) * scale) for each, begin, end in row if each.op is kind]
            path = "".join(f"M{x:.1f} {y}h{max(width - 0.3, 0.1):.1f}v{_BAR}H{x:.1f}z" for x, width in spans)
            if path:
                said = f"{kind.name.lower()} of stage {rank}"
                marks.append(f'<path fill="{_COLOURS[_PASSES[kind]]}" d="{path}"><title>{said}</title></path>')
    schedule = timeline.schedule
    caption = (
        f"<p>{escape(schedule.name)}: {schedule.micro_batches} micro batches in {timeline.length * 1e3:.2f} ms, of "
        f"which the stages wait {timeline.bubble:.1%} (the bubble)</p>"
    )
    return caption + picture(len(timeline.spans) * (_BAR + 4), "schedule of the pipeline", marks)


def _block(x: float, y: float, width: float, colour: str, said: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{_BAR}" fill="{colour}">'
        f"<title>{escape(said)}</title></rect>"
    )


def picture(height: float, label: str, marks: Sequence[str]) -> str:
    """A drawing as wide as the page."""
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{"".join(marks)}</svg>'
