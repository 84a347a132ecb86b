"""Write `holdall/data/corpus.txt`, the text that the demo trains on.

The text is ours: a small grammar tells scenes of one valley, with people, places, quantities and reasons that agree inside a
scene. So a model has something to learn at every distance: spelling, agreement, who is meant by "she", and sums that come out
right. It is the same on every machine: only `Random.random` is used, whose sequence Python promises to keep.

A scene is one sentence a line. `[this|that]` is one of the two, and a line that begins with `?` is told half of the time.

    python benchmarks/make_corpus.py           write the file
    python benchmarks/make_corpus.py --check   fail if the file is not what this script writes
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

TARGET = Path(__file__).parents[1] / "holdall" / "data" / "corpus.txt"
LENGTH = 160_000
SEED = 20

T = TypeVar("T")

# fmt: off
WOMEN = [
    "Mara", "Ilse", "Tova", "Renske", "Odile", "Sunniva", "Halla", "Petra",
    "Nadia", "Brisa", "Wilma", "Ayo", "Fenna", "Lucia", "Greta", "Imani",
]
MEN = [
    "Joren", "Aldo", "Piet", "Tomas", "Kofi", "Ruben", "Silas", "Emeric",
    "Bram", "Otto", "Henrik", "Davi", "Mateo", "Yusuf", "Lars", "Anton",
]
PLACES = [
    "Elderford", "Grayhaven", "Millbrook", "Saltmarsh", "Oakhurst", "Stonebridge",
    "Fernley", "Westwater", "Pinecrest", "Lowmoor", "Thornby", "Hazelwick",
]
TRADES = ["carpenter", "weaver", "potter", "blacksmith", "baker", "bookbinder", "glazier", "saddler", "cooper", "tinsmith"]
MADE = {  # trade -> what it makes, of what, with what
    "carpenter": (["table", "chest", "ladder", "bench"], ["oak", "pine", "walnut"], ["plane", "saw"]),
    "weaver": (["blanket", "scarf", "rug"], ["wool", "linen"], ["loom", "shuttle"]),
    "potter": (["bowl", "jug", "lamp"], ["red clay", "white clay"], ["wheel", "kiln"]),
    "blacksmith": (["gate", "hinge", "anchor"], ["iron", "steel"], ["hammer", "anvil"]),
    "baker": (["loaf", "cake", "pie"], ["rye flour", "wheat flour"], ["oven", "peel"]),
    "bookbinder": (["ledger", "atlas", "notebook"], ["linen thread", "calf leather"], ["press", "needle"]),
    "glazier": (["window", "lantern"], ["clear glass", "green glass"], ["cutter", "frame"]),
    "saddler": (["saddle", "satchel", "belt"], ["brown leather", "soft leather"], ["awl", "mallet"]),
    "cooper": (["barrel", "bucket", "tub"], ["split oak", "seasoned ash"], ["adze", "hoop driver"]),
    "tinsmith": (["kettle", "funnel", "candlestick"], ["tin", "copper"], ["mallet", "soldering iron"]),
}
FRUIT = ["apples", "pears", "plums", "quinces", "cherries", "figs"]
CROPS = ["beans", "turnips", "onions", "carrots", "cabbages", "peas", "leeks", "beets"]
ANIMALS = ["heron", "fox", "otter", "badger", "owl", "hare", "magpie", "stoat"]
BOATS = ["the Kestrel", "the Blue Thistle", "the Patient Anne", "the Second Wind", "the Marigold", "the Old Promise"]
CARGO = ["salt", "timber", "wool", "lamp oil", "barley", "roof tiles", "copper wire", "dried fish"]
WINDS = ["north", "south", "east", "west"]
SEASONS = ["spring", "summer", "autumn", "winter"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
BAGS = ["a canvas bag", "a leather case", "a wicker basket", "a wooden crate", "a deep rucksack"]
THINGS = ["the lamp", "the kettle", "the blanket", "the rope", "the tent", "the map", "the bread", "the lantern", "the coat"]
MOODS = ["quietly", "with care", "without hurry", "gladly", "in silence", "by lamplight", "before dawn", "after supper"]
MORALS = [
    "Who shares a little keeps the most",
    "A full store is worth less than a good neighbour",
    "It is easier to carry a plan than a load",
    "What you can find again you need not carry",
    "Wait for the thing you need and not for all things",
]
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
# fmt: on


@dataclass(frozen=True)
class Person:
    name: str
    she: str
    her: str  # possessive
    them: str  # object


class Teller:
    """Draws words; everything random goes through `pick` and `chance`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def two(self, options: Sequence[T]) -> tuple[T, T]:
        """Two different ones."""
        first = int(self.random() * len(options))
        second = int(self.random() * (len(options) - 1))
        return options[first], options[second + (second >= first)]

    def number(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self.random() < share

    def person(self) -> Person:
        if self.chance(0.5):
            return Person(self.pick(WOMEN), "she", "her", "her")
        return Person(self.pick(MEN), "he", "his", "him")

    def people(self) -> tuple[Person, Person]:
        first = self.person()
        second = self.person()
        while second.name == first.name:
            second = self.person()
        return first, second


def said(number: int) -> str:
    """A number as the valley says it: words up to twenty, tens and units above."""
    if number <= 20:
        return NUMBERS[number]
    tens = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    if number < 100:
        return tens[number // 10] + (f"-{NUMBERS[number % 10]}" if number % 10 else "")
    rest = f" and {said(number % 100)}" if number % 100 else ""
    return f"{NUMBERS[number // 100]} hundred{rest}"


def a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def plural(noun: str) -> str:
    if noun == "loaf":
        return "loaves"
    return noun + ("es" if noun.endswith(("s", "ch", "x")) else "s")


def workshop(t: Teller) -> str:
    p, trade, place = t.person(), t.pick(TRADES), t.pick(PLACES)
    things, stuffs, tools = MADE[trade]
    thing, stuff, tool = t.pick(things), t.pick(stuffs), t.pick(tools)
    time, price, more = t.number(2, 9), t.number(3, 40), t.number(2, 6)
    unit = "hours" if trade == "baker" else "days"
    return f"""
    {p.name} was [{a(trade)} in {place}|the only {trade} of {place}|{a(trade)}, and {place} knew it].
    ?Most of {p.her} work was done {t.pick(MOODS)}, [when the street was still|with the shutters half open].
    [That week|One {t.pick(DAYS)}|In {t.pick(SEASONS)}] [{p.she} was asked for|someone ordered] {a(thing)} of {stuff}.
    {capital(p.she)} [cleaned|took up|borrowed] {p.her} {tool}, measured [twice|three times], and began.
    ?The {stuff} was [stubborn|softer than it looked|of the good kind], and {p.she} [hummed as {p.she} worked|said nothing].
    After {said(time)} {unit} the {thing} was [done|ready|finished], and {p.name} set it [by the door|on the sill|in the light].
    ?"{capital(said(price))} coins," said {p.name}, "because the {stuff} was good and the {tool} is old."
    ?At {said(price)} coins for each, {said(more)} {plural(thing)} would [cost|be|come to] {said(more * price)} coins.
    """


def market(t: Teller) -> str:
    p, q = t.people()
    fruit, other = t.two(FRUIT)
    x, y, taken = t.number(5, 40), t.number(5, 40), t.number(2, 5)
    compared = (
        "as many of the one as of the other" if x == y else f"more {fruit if x > y else other} than {other if x > y else fruit}"
    )
    return f"""
    On {t.pick(DAYS)} the market of {t.pick(PLACES)} [opened early|was crowded|smelled of rain and bread].
    {p.name} [brought|laid out|had] {said(x)} {fruit} and {said(y)} {other}, [which made|in sum] {said(x + y)}.
    ?There were {compared}.
    {q.name} {t.pick(["looked at", "weighed", "asked about", "smelled"])} the {fruit} first and [then|after that] the {other}.
    "[How many {fruit} are there|How many {fruit} have you]?" asked {q.name}.
    "There are {said(x)}," [answered|said] {p.name}, "and if you take {said(taken)}, there will be {said(x - taken)}."
    ?{q.name} took {said(taken)}, and {said(x - taken)} {fruit} [were left in the basket|stayed where they were].
    ?"[Come again|Tell the others|Mind the step]," said {p.name}, and [wiped {p.her} hands|folded the cloth].
    """


def journey(t: Teller) -> str:
    p, (start, end) = t.person(), t.two(PLACES)
    speed, hours = t.number(3, 6), t.number(2, 9)
    return f"""
    The [road|path|old way] from {start} to {end} is {said(speed * hours)} miles long.
    {p.name} [walked|covered] it in {said(hours)} hours, {said(speed)} miles in [every|each] hour.
    The wind came from the {t.pick(WINDS)}, and {p.she} [kept {p.her} collar up|sang against it|was glad of {p.her} coat].
    ?[Halfway there|Where the road bends|By the third milestone] {p.she} saw {a(t.pick(ANIMALS))}, and it saw {p.them}.
    ?At the [bridge|ford|gate] {p.she} rested [under a tree|on a wall] and ate half of {p.her} [bread|cheese].
    In {end} someone had [lit a fire|left a lamp burning|put the soup on], and nobody asked {p.them} why {p.she} had come.
    """


def harbour(t: Teller) -> str:
    p, boat, (first, second) = t.person(), t.pick(BOATS), t.two(CARGO)
    room, x, extra = t.number(70, 120), t.number(10, 60), t.number(2, 9)
    return f"""
    {capital(boat)} could carry {said(room)} crates and [not one more|no more than that].
    In the morning {said(x)} crates of {first} were [loaded|stowed|put aboard], so there was room for {said(room - x)}.
    {p.name} [wanted|hoped] to send {said(room - x + extra)} crates of {second}, which was {said(extra)} too many.
    [So|And so] {said(extra)} crates [stayed on the quay|were left in the shed], under a cloth, until the boat came back.
    With the wind in the {t.pick(WINDS)}, {boat} [left before noon|was gone by dusk|took the tide].
    ?What does not fit today can be fetched tomorrow, as {p.name} [used to say|often said|told the boys].
    ?[The gulls|The children|Two old men] watched [the sail|the wake] until there was nothing to see.
    """


def packing(t: Teller) -> str:
    p, (first, second) = t.person(), t.two(THINGS)
    third = t.pick([x for x in THINGS if x not in (first, second)])
    return f"""
    {p.name} had {t.pick(BAGS)} that held {said(t.number(6, 20))} pounds[|, and a long way to go|, and no more].
    {capital(first)} went in first, because it would be needed last.
    {capital(second)} [went in|came] next, and {third} lay on top.
    ?When there was no room left, {p.she} took {first} out again and packed it [better|tighter|flat].
    ?What {p.she} could make again on the way, {p.she} left at home.
    ?What {p.she} would not need before evening, {p.she} sent ahead with the cart.
    ?Whatever could be folded smaller, {p.she} folded smaller.
    On the road {p.she} [reached|felt] for {third}, then for {second}, and [at the very end|last of all] for {first}.
    """


def garden(t: Teller) -> str:
    p, (crop, other), season = t.person(), t.two(CROPS), t.number(0, 3)
    rows, each = t.number(3, 9), t.number(4, 12)
    return f"""
    In {SEASONS[season]} {p.name} dug the long bed [behind the house|by the wall|below the orchard].
    {capital(p.she)} [planted|set] {said(rows)} rows of {crop}, {said(each)} to a row, which is {said(rows * each)}.
    Between the rows {p.she} put {other}, since {crop} and {other} [do each other good|get along|share the shade].
    ?[It rained for {said(t.number(2, 9))} days|There was no rain, and {p.she} carried water {t.pick(MOODS)}|The sun was kind].
    ?A neighbour [laughed at|admired|walked along] the crooked rows, [but|and] {p.name} did not mind.
    After {SEASONS[season]} came {SEASONS[(season + 1) % 4]}, and the {crop} stood [as high as {p.her} knee|green and straight].
    """


def fable(t: Teller) -> str:
    x, y = t.two(ANIMALS)
    fruit = t.pick(FRUIT)
    return f"""
    {capital(a(x))} and {a(y)} lived [on the two banks of one stream|at the two ends of one wood|under the same hill].
    The {x} kept {fruit} in a hollow tree, and the {y} kept [nothing at all|no store of any kind].
    "Why do you keep nothing?" asked the {x}.
    "Because I know where everything grows," [answered|said] the {y}.
    [When the water rose|When the great storm came|One night], the hollow tree was [flooded|broken], and the {fruit} were lost.
    Then the {y} showed the {x} where the {fruit} grew, and they [ate together|ate until dark].
    {t.pick(MORALS)}.
    """


def lesson(t: Teller) -> str:
    p, q = t.people()
    asked = []
    for _ in range(t.number(2, 4)):
        x, y = t.number(2, 12), t.number(2, 12)
        word, result = t.pick([("and", x + y), ("times", x * y)])
        asked.append(f'"What is {said(x)} {word} {said(y)}?" [|asked {p.name}. ]"{capital(said(result))}," said {q.name}.')
    lines = "\n".join(asked)
    return f"""
    {p.name} taught the children of {t.pick(PLACES)} to [count|reckon|do sums].
    {lines}
    "[Right|Good|Just so]," said {p.name}, and [wrote it on the slate|nodded|turned the page].
    ?{q.name} was [proud|quick|seldom wrong], and [the others knew it|the bell rang soon after].
    """


def letter(t: Teller) -> str:
    p, q = t.people()
    return f"""
    Dear {p.name},
    I came to {t.pick(PLACES)} on {t.pick(DAYS)} with {t.pick(BOATS)}, and I am [well|tired but well|glad to be on land].
    The room is [small, but the window looks over the water|large and cold, and I sit by the stove|above the bakery, and warm].
    ?I have [thought about|not forgotten] what you said, and I believe you are right about the {t.pick(CARGO)}.
    ?Please [water the {t.pick(CROPS)}|feed the hens|mend the gate] while I am away.
    ?The [people here|neighbours] speak slowly and [laugh often|ask many questions].
    If the {t.pick(WINDS)} wind holds, I shall be home before {t.pick(SEASONS)}.
    Your [friend|old friend|cousin], {q.name}.
    """


def kitchen(t: Teller) -> str:
    p, q = t.people()
    cups, guests, crop = t.number(2, 6), t.number(2, 5), t.pick(CROPS)
    return f"""
    For one guest {p.name} used {said(cups)} cups of [flour|broth|milk] and a handful of {crop}.
    That evening there were {said(guests)} guests, so {p.she} used {said(cups * guests)} cups.
    [Stir slowly|Keep the lid on|Taste it often], {p.she} said, and [do not let it boil|salt it at the end|wait until it sings].
    ?{q.name} burned {q.her} tongue and [asked for more|laughed|blamed the spoon].
    ?[The pot was empty|Nothing was left] before the lamp was lit.
    """


def clock(t: Teller) -> str:
    p, hour, wait = t.person(), t.number(1, 7), t.number(1, 5)
    return f"""
    The clock of {t.pick(PLACES)} struck {said(hour)}.
    {p.name} had to wait {said(wait)} more {"hour" if wait == 1 else "hours"}, until {said(hour + wait)}.
    [Outside|In the yard|On the roof] {a(t.pick(ANIMALS))} [moved in the dark|called once|crossed the snow].
    ?{capital(p.she)} counted [the strokes|the stairs|{p.her} coins] and [lost count|began again|fell asleep].
    When it struck {said(hour + wait)}, {p.she} [rose|took {p.her} hat] and went out {t.pick(MOODS)}.
    """


def repair(t: Teller) -> str:
    p, q = t.people()
    trade = t.pick([x for x in TRADES if x != "baker"])  # nobody mends a loaf
    thing = t.pick(MADE[trade][0])
    return f"""
    "My {thing} is [past use|spoiled|worn out]," said {q.name}.
    "Then [bring it to|ask] {p.name}," said [the miller|the ferryman|the schoolmaster], "for {p.she} is {a(trade)}."
    {p.name} [turned the {thing} over|held it to the window|knocked on it] and [frowned|smiled|was silent for a while].
    "[It can be mended|It only wants patience|I have seen worse]," {p.she} said, "but not before {t.pick(DAYS)}."
    ?{q.name} [thanked {p.them}|paid at once|offered {p.them} {t.pick(FRUIT)}] and went home {t.pick(MOODS)}.
    """


SCENES: tuple[Callable[[Teller], str], ...] = (
    workshop,
    market,
    journey,
    harbour,
    packing,
    garden,
    fable,
    lesson,
    letter,
    kitchen,
    clock,
    repair,
)


def tell(t: Teller, scene: str) -> str:
    """One paragraph: choices made, optional lines kept or left out."""
    told = []
    for line in scene.strip().splitlines():
        sentence = line.strip()
        if sentence.startswith("?") and t.chance(0.5):
            continue
        told.append(re.sub(r"\[([^\]]*)\]", lambda found: t.pick(found[1].split("|")), sentence.removeprefix("?")))
    return " ".join(told)


def corpus(seed: int = SEED, length: int = LENGTH) -> str:
    """About `length` characters, one paragraph a scene."""
    teller = Teller(seed)
    told: list[str] = []
    size = 0
    while size < length:
        told.append(tell(teller, teller.pick(SCENES)(teller)))
        size += len(told[-1]) + 2
    return "\n\n".join(told) + "\n"


def main() -> int:
    text = corpus()
    if "--check" in sys.argv[1:]:
        same = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name}: {'as written here' if same else 'differs; run this script without --check'}")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {len(text)} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
