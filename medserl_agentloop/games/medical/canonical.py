"""The meaning of a note apart from its spelling and layout, so that dressing never counts as an
edit.

Two notes say the same where their canonical words are equal: case, punctuation, white space,
hyphens, invisible characters, letters that look like others, HTML and LaTeX, formats of numbers and
dates, units, list numbers and common abbreviations make no difference. Whether a synonym says the
same is for the judge. It takes linear time.
"""

from __future__ import annotations

import html
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from functools import cache

import regex

from medserl_agentloop.scoring.notes import spaced

# What fonts show as nothing, and control characters that end no line. General categories miss some
# of it: U+034F is a mark, U+115F a letter.
_UNSEEN = regex.compile(r"[\p{Default_Ignorable_Code_Point}\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")
# Bullets, middle dots, and a blank that counts as a symbol.
_BLANKS = "\u2022\u2023\u2043\u25aa\u25cf\u25e6\u00b7\u2219\u2027\u22c5\u2800"
_SPELLING = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\u00b4\u275b\u275c", "'"),
        **dict.fromkeys(
            "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u275d\u275e\u300c\u300d", '"'
        ),
        **dict.fromkeys("\u2010\u2011\u2012\u2212", "-"),
        **dict.fromkeys("\u2014\u2015", "\u2013"),
        **dict.fromkeys(_BLANKS, " "),
        **dict.fromkeys("\u2122\u00ae\u00a9\u2120", None),  # trade marks
        **dict.fromkeys(
            "\u0640\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652", None
        ),  # Arabic short vowels
        **{
            "\u060c": ",",
            "\u061b": ";",
            "\u061f": "?",
            "\u06d4": ".",
            "\u3001": ",",
            "\u3002": ".",
        },
        **{"\u00ba": "\u00b0", "\u00d7": "x", "\u2264": "<=", "\u2265": ">="},
    }
)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,30});")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_DECIMAL_POINT = re.compile(r"(?<=\d)[\u00b7\u2219\u2027\u066b](?=\d)")
_THOUSANDS = re.compile(r"(?<=\d)[\u00a0\u2009\u202f\u066c](?=\d{3}(?!\d))")
_SYMBOLS = re.compile(r"[^\w\x00-\x7f]{31,}")  # combining marks among them
# NFKC would make 102 of 10², and 51/2 of 5½.
_RAISED = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u2079])")
_FOOTNOTE = re.compile(r"(?<=[A-Za-z]{3})[\u00b9\u00b2\u00b3\u2070\u2074-\u2079](?!\w)")
_NEXT_NUMBER = re.compile(
    r"(?<=\d)(?=[\u00bc-\u00be\u2080-\u2089\u2150-\u215f\u2189\u2460-\u249b])"
)

# Cyrillic, Greek and Coptic letters and what they look like (from Unicode's confusables.txt).
_LOOK_ALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u051b\u051d\u04bb\u04cf\u043a\u043c\u0442\u043d"
    "\u0432\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406\u0408\u0405\u051a\u051c\u04c0"
    "\u03b1\u03b3\u03b7\u03b9\u03ba\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7\u03c9"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u0251\u0269"
    "\u2c81\u2c83\u2c89\u2c8d\u2c8f\u2c93\u2c95\u2c99\u2c9b\u2c9f\u2ca3\u2ca5\u2ca7\u2ca9\u2cad",
    "aeopcyxijsdqwhlkmthbABEKMHOPCTYXIJSQWIaynikvoptuxwABEZHIKMNOPTYXaiabezhikmnopctyx",
)
_NAMED_LATIN = re.compile(
    r"LATIN (?:SMALL |CAPITAL )?LETTER (?:SMALL CAPITAL |SCRIPT |OPEN |DOTLESS )?([A-Z])(?: WITH "
    r"[A-Z ]+)?"
)
_GREEK = {"\u03b1": "alpha", "\u03b2": "beta", "\u03b3": "gamma", "\u03b4": "delta"}
_LETTERS = re.compile(r"[^\W\d_]+")
_LATIN = re.compile("[A-Za-z]")
_MOLAR = re.compile(r"(?<=\d)( ?[munp\u00b5\u03bc]?)M(?!\w)")
_ACCENTS = re.compile("(?<=[A-Za-z])[\u0300-\u0333\u0339-\u036f]+")  # not those that strike through

_DASH = re.compile(r"(?<=\d) ?\u2013 ?(?=\d)")
# Before a number, at the end of a clause and after an abbreviation a dash may be a sign: "BE
# \u20135", "HIV \u2013".
_MINUS = re.compile(
    r"(?:\u2013|-{2,})(?= ?\.?\d|ve\b| ?(?:[.,;:!?)\]]|$))|(?<=[A-Z]{2}) ?\u2013(?= )"
)
# Between words, and between a number and its unit. Before a number it may be a sign: "BE-5" is not
# "BE 5".
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])|(?<=\d)-(?=[^\W\d_])|(?<=[^\W\d_]{3})-(?=\d)")
_SEPARATOR = re.compile(r"\u2013|-{2,}")
_TOKEN = re.compile(
    r"(?P<number>[1-9]\d{0,2}(?:(?:,\d{3})+| 0\d\d(?: "
    r"\d{3})*)(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)"
    r"|(?P<word>[^\W\d_](?:\.[^\W\d_])+(?![^\W\d_])|[^\W\d_]+(?:'[^\W\d_]+)*)"
    r"|(?P<per>/\s*(?=[^\W\d_]))"
    r"|(?P<sign>(?!(?<![^\s(])(?<!\d )\+\d)[^\w\s.,;:!?\"'()\[\]{}*`\u00b0])"
)
_NUMBER_NAMES = """zero one two three four five six seven eight nine ten eleven twelve thirteen \
fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
_NUMBER_WORDS = {
    name: n if n < 20 else 10 * (n - 18) for n, name in enumerate(_NUMBER_NAMES.split())
}
_ONES, _TENS, _EVERY = (
    "|".join(list(_NUMBER_WORDS)[first:end]) for first, end in ((1, 10), (20, 28), (0, 28))
)
_IN_WORDS = re.compile(rf"\b(?:(?:{_TENS})[ -](?:{_ONES})|{_EVERY})\b")
_ALONE = r"(?<![\w.,/+^-])\d{1,15}(?:\.\d{1,9})?"
_POWER = re.compile(
    rf"(?:({_ALONE})(?:e| ?[x*] ?10 ?\^)|(?<![\w.,/+^-])10 ?\^)\{{?([+-]?\d\d?)\}}?(?![\w^]|[.,]\d)"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6}  # powers of ten
# Single characters set apart: "6 5 0 mg", "a s p i r i n". Two may be two things, but not where one
# of them is 0 mg.
_SET_APART = re.compile(
    r"(?<![\w.,/^-])[a-z\d](?:(?: [a-z\d](?!\w)){2,}| 0(?= ?(?:mg|mcg|g|ml|units?)\b))(?![.,]\d)"
)
_RANGE = re.compile(r"\bbetween (\d[\d.]{0,20}) and (?=\d)|(?<=\d) (?:to|through) (?=\d)")
_LIST_NUMBER = re.compile(r"(?:^|(?<=[:;,.!?] ))\d{1,2}\)(?= |$)|(?:^|(?<=[.!?] ))\d{1,2}\.(?= |$)")
_SIDE = re.compile(r"(?<![\w'/-])(?<!\d )(?<!per )(?:(l)|r)t?\b\.?(?= [a-z]{3})")
_TERM = r"\d{1,9}(?:\.\d{1,9}|/[1-9]\d{0,8})?"
_CALCULATION = re.compile(
    rf"(?<![\w.,/+^-])(?=[\d. ]{{1,30}}[+/]){_TERM}(?:(?: ?\+ ?| (?=\d+/)){_TERM}){{0,9}}"
    r"(?= ?(?:[mku\u03bc]?g|mcg|ml|units?)\b)",
    re.IGNORECASE,
)
# After a number or "per" alone: elsewhere "g" and "h" are letters.
_UNIT_SPELLINGS = """
kg = kgs kilogram kilograms; g = gm gms gram grams; mg = mgs milligram milligrams; ng = nanogram \
nanograms
mcg = ug \u03bcg microgram micrograms; l = liter liters litre litres; dl = deciliter deciliters \
decilitre decilitres
ml = mls cc milliliter milliliters millilitre millilitres; cm = centimeter centimeters centimetre \
centimetres
mm = millimeter millimeters millimetre millimetres; lb = lbs pound pounds; s = sec secs second \
seconds
min = mins minute minutes; h = hr hrs hour hours; day = days; week = wk wks weeks; month = mo mos \
months
year = y yr yrs years; unit = u units iu; tablet = tab tabs tablets; % = percent; c = celsius; f \
= fahrenheit
"""
_UNITS = {"deg": "", "degree": "", "degrees": ""}
for _pair in _UNIT_SPELLINGS.strip().replace("\n", "; ").split("; "):
    _unit, _spellings = _pair.split(" = ")
    _UNITS.update(dict.fromkeys([_unit, *_spellings.split()], _unit))
_IN_BASE_UNITS = {
    **{
        unit: (10**places, "ng")
        for unit, places in {"kg": 12, "g": 9, "mg": 6, "mcg": 3, "ng": 0}.items()
    },
    **{unit: (10**places, "ml") for unit, places in {"l": 3, "dl": 2, "ml": 0}.items()},
    **{
        unit: (n, "s")
        for unit, n in {"s": 1, "min": 60, "h": 3600, "day": 86400, "week": 604800}.items()
    },
}
# A number of at most 20 digits, for a Decimal has 28, with its unit; before it another one, as in
# "1 to 2 g".
_AMOUNT = re.compile(
    r"(?<!\S)(\d\S* (?:(?:or|and|[-/x*+\u00d7]) )?)?(\d[\d.]{0,19}) "
    r"(?!(?:or|and|x) )([^\W\d_]+)(?: per (d?l|ml))?(?!\S)"
)
# Reviewed: each has one meaning in a clinical note. PE, MS, RA, AS, PT, OD, DM, ED and the like
# have several.
_ABBREVIATIONS = """
qd = daily; bid = 2 times daily; tid = 3 times daily; qid = 4 times daily; qod = every other day; \
qhs = at bedtime
once = 1 time; 1 times = 1 time; twice = 2 times; thrice = 3 times; 1 time daily = daily; 1 time \
weekly = weekly
a day = daily; per day = daily; each day = daily; every day = daily; a week = weekly; per week = \
weekly
every 86400 s = daily; every 43200 s = 2 times daily; every 28800 s = 3 times daily; every 21600 \
s = 4 times daily
every 172800 s = every other day; every week = weekly; every 604800 s = weekly; prn = as needed
more than = >; greater than = >; less than = <; fewer than = <; greater than or equal to = > =; \
at least = > =
less than or equal to = < =; at most = < =; no more than = < =; r per o = rule out; b per l = \
bilateral
first = 1 st; second = 2 nd; third = 3 rd; fourth = 4 th; fifth = 5 th; sixth = 6 th; seventh = 7 \
th; eighth = 8 th
ninth = 9 th; tenth = 10 th
po = by mouth; orally = by mouth; npo = nothing by mouth; iv = intravenous; intravenously = \
intravenous
im = intramuscular; intramuscularly = intramuscular; sc = subcutaneous; sq = subcutaneous; subq = \
subcutaneous
subcutaneously = subcutaneous; ecg = electrocardiogram; ekg = electrocardiogram; eeg = \
electroencephalogram
ct = computed tomography; mri = magnetic resonance imaging; cbc = complete blood count; csf = \
cerebrospinal fluid
wbc = white blood cell; rbc = red blood cell; bmi = body mass index; tsh = thyroid stimulating \
hormone
bun = blood urea nitrogen; ldl = low density lipoprotein; hdl = high density lipoprotein; bp = \
blood pressure
hr = heart rate; rr = respiratory rate; bpm = beats per min; mm hg = mmhg; htn = hypertension
copd = chronic obstructive pulmonary disease; chf = congestive heart failure; cad = coronary \
artery disease
mi = myocardial infarction; dvt = deep vein thrombosis; deep venous thrombosis = deep vein \
thrombosis
uti = urinary tract infection; hiv = human immunodeficiency virus; nsaid = nonsteroidal anti \
inflammatory drug
gerd = gastroesophageal reflux disease; type 1 dm = type 1 diabetes mellitus; t 1 dm = type 1 \
diabetes mellitus
type 2 dm = type 2 diabetes mellitus; t 2 dm = type 2 diabetes mellitus; hx = history; dx = \
diagnosis
h per o = history of; c per o = complains of; s per p = status post; w per o = without; w per = \
with; w / = with
hrs = hours; yrs = years; yo = year old; y per o = year old; year per o = year old
& = and; cannot = can not; \u03bcmol = umol; can't = can not; won't = will not
"""
_VERBS = "is are was were do does did has have had could should would"
_FULL = {
    **dict(pair.split(" = ") for pair in _ABBREVIATIONS.strip().replace("\n", "; ").split("; ")),
    **{
        f"q {hours * 3600} s": f"every {hours * 3600} s"
        for hours in (1, 2, 3, 4, 6, 8, 12, 24, 48, 72)
    },
    **{
        f"{kind} {'i' * n}": f"{kind} {n}"
        for kind in ("type", "class", "grade", "stage")
        for n in (1, 2, 3)
    },
    **{f"{verb}n't": f"{verb} not" for verb in _VERBS.split()},
}
_ABBREVIATION = re.compile(
    rf"(?<!\S)(?:{'|'.join(map(re.escape, sorted(_FULL, key=len, reverse=True)))})(?!\S)"
)

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_DATE = re.compile(
    rf"\b(?:{_MONTH}[ -](?:the )?{_DAY}(?:(?:,? |-)(\d{{4}}))?|{_DAY}[ -](?:of )?{_MONTH}(?:(?:,? "
    r"|-)(\d{4}))?"
    r"|(\d{4})[/-](\d\d?)[/-](\d\d?)|(0?[1-9]|1[0-2])[/-](\d\d?)[/-](\d{4}|\d\d))(?![\w/-])"
)

_TIE = re.compile(r"(?<=\w)~(?=[a-z])")
_FORMULA = re.compile(r"\$([^$]{1,80})\$")
_FRACTION = re.compile(r"\\frac\{(\d{1,9})\}\{(\d{1,9})\}")
_COMMAND = re.compile(r"\\(mu ?\b|[a-z]+|[%&$#,;: ])")
_DEGREE = re.compile(r"\^\{?\u00b0\}?")
_LATEX = {
    **dict.fromkeys(("text", "textbf", "textit", "textrm", "mathrm", "mathbf", "emph", "mbox"), ""),
    **dict.fromkeys((",", ";", ":", "quad"), " "),
    **{
        "mu": "u",
        "mu ": "u",
        "circ": "\u00b0",
        "times": "x",
        "pm": "\u00b1",
        "to": "\u2192",
        "rightarrow": "\u2192",
    },
    **{"le": "<=", "leq": "<=", "ge": ">=", "geq": ">="},
}


def visible(text: str) -> str:
    """``text`` as a reader sees it: without hidden characters, accents, entities and
    look-alikes."""
    text = _UNSEEN.sub("", _ENTITY.sub(lambda entity: html.unescape(entity[0]), text))
    if text.isascii():
        return text
    text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = _THOUSANDS.sub(",", _DECIMAL_POINT.sub(".", text))
    text = _NEXT_NUMBER.sub(" ", _RAISED.sub("^", _FOOTNOTE.sub("", text).translate(_SPELLING)))
    text = _LETTERS.sub(_as_latin, unicodedata.normalize("NFKD", _SYMBOLS.sub(_few_marks, text)))
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", text)).replace("\u2044", "/")


def canonical_words(text: str, *, hyphen: str = " ") -> list[str]:
    """Return the content of ``text``: words, numbers by value, units, signs; ``hyphen`` replaces
    one between words.
    """
    text = " ".join(spaced(visible(text)).replace("_", " ").split())
    text = _MOLAR.sub(r"\1mol/L", _MINUS.sub("\u2212", _DASH.sub("-", _LIST_NUMBER.sub("", text))))
    text = _in_digits(_SEPARATOR.sub(" ", _DATE.sub(_as_date, _without_latex(text.casefold()))))
    text = _SIDE.sub(lambda side: "left" if side[1] else "right", text)
    words: list[str] = []
    counts = False  # whether a unit may follow
    for match in _TOKEN.finditer(_HYPHEN.sub(hyphen, text).replace("\u2212", "-")):
        token = match[0].replace(".", "") if match.lastgroup == "word" else match[0]
        if match.lastgroup == "number":
            token = _value(token)
        elif match.lastgroup == "per":
            token = "per"
        elif counts and token in _UNITS:
            token = _UNITS[token]
            if not token:
                continue
        words.append(token)
        counts = token[0].isdecimal() or token == "per"
    content = _AMOUNT.sub(_in_base_units, " ".join(words))
    for _ in range(2):  # "q12h" by way of "every 12 hours"
        content = _ABBREVIATION.sub(lambda short: _FULL[short[0]], content)
    return content.split()


def says_the_same(a: str, b: str) -> bool:
    """Return whether two notes are only written differently; ``x-ray`` equals ``x ray`` and
    ``xray``, which differ.
    """
    # "8/2 mg" may be two drugs, so it is "4 mg" and is not "4/1 mg": only one side is worked out.
    pairs = dict.fromkeys([(a, b), (_calculated(a), b), (a, _calculated(b))])
    return any(
        canonical_words(x, hyphen=h) == canonical_words(y, hyphen=h)
        for x, y in pairs
        for h in (" ", "")
    )


def _as_latin(letters: re.Match[str]) -> str:
    word = letters[0]
    latin = _GREEK.get(word) or "".join(map(_latin_letter, word.translate(_LOOK_ALIKES)))
    return latin if latin.isascii() or _LATIN.search(word) else word


@cache
def _latin_letter(letter: str) -> str:
    """The letter of the alphabet that a variant of it (\u0131, \u026a, \u00f8) looks like."""
    name = unicodedata.name(letter, "")
    plain = None if letter.isascii() else _NAMED_LATIN.fullmatch(name)
    if plain is None:
        return letter
    return plain[1] if name.startswith("LATIN CAPITAL") else plain[1].lower()


def _few_marks(symbols: re.Match[str]) -> str:
    """The symbols without combining marks after the 30th, which normalising would sort in quadratic
    time.
    """
    return symbols[0][:30] + "".join(c for c in symbols[0][30:] if not unicodedata.combining(c))


def _without_latex(text: str) -> str:
    text = _FRACTION.sub(r"\1/\2", _FORMULA.sub(r"\1", _TIE.sub(" ", text)))
    return _DEGREE.sub(
        "\u00b0", _COMMAND.sub(lambda command: _LATEX.get(command[1], command[1]), text)
    )


def _as_date(date: re.Match[str]) -> str:
    """A date as year, month and day; with slashes it is read as in MEDEC, the month first."""
    name, day, year, day_2, name_2, year_2, *numbers = date.groups()
    if name or name_2:
        month = _MONTHS.index((name or name_2)[:3]) + 1
        numbers = [year or year_2 or "", str(month), day or day_2]
    elif numbers[0] is None:
        numbers = [("" if len(numbers[5]) == 4 else "20") + numbers[5], numbers[3], numbers[4]]
    return " ".join(number.lstrip("0") for number in numbers[:3]) + " date"


def _in_digits(text: str) -> str:
    """Numbers as digits without words and powers, ``5 to 10`` and ``between 5 and 10`` as
    ``5-10``."""
    text = _IN_WORDS.sub(
        lambda words: str(sum(_NUMBER_WORDS[w] for w in re.split("[ -]", words[0]))), text
    )
    text = _SET_APART.sub(lambda apart: apart[0].replace(" ", ""), text)
    text = _POWER.sub(lambda power: format(Decimal(f"{power[1] or 1}e{power[2]}"), "f"), text)
    for scale, places in _SCALES.items():
        scaled = rf"(?:({_ALONE})|\ba) ({scale})\b(?:(?: and)? (\d{{1,{places}}})(?![\w.,/]))?"
        text = re.sub(
            scaled,
            lambda n: format(Decimal(f"{n[1] or 1}e{_SCALES[n[2]]}") + int(n[3] or 0), "f"),
            text,
        )
    return _RANGE.sub(lambda between: f"{between[1] or ''}-", text)


def _calculated(text: str) -> str:
    """``text`` with ``10/2 mg``, ``5 1/2 mg`` and ``3 + 2 mg`` worked out."""
    text = re.sub(r"(?<=\d) ?/ ?(?=[1-9])", "/", visible(text))
    return _CALCULATION.sub(
        lambda sum_: f"{float(sum(map(Fraction, sum_[0].replace('+', ' ').split()))):.9f}", text
    )


def _value(number: str) -> str:
    whole, _, part = number.replace(",", "").replace(" ", "").partition(".")
    whole, part = whole.lstrip("0") or "0", part.rstrip("0")
    return f"{whole}.{part}" if part else whole


def _in_base_units(amount: re.Match[str]) -> str:
    """An amount in the base unit of its kind; as it is where another number belongs to it."""
    other, number, unit, volume = amount.groups()
    factor, base = _IN_BASE_UNITS.get(unit, (1, unit))
    if other or (unit not in _IN_BASE_UNITS and not volume):
        return amount[0]
    value = Decimal(number) * factor / (_IN_BASE_UNITS[volume][0] if volume else 1)
    return f"{_value(format(value, 'f'))} {base}{' per ml' if volume else ''}"
