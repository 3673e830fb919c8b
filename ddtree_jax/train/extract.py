"""Plain text out of wheels and Debian packages: files, HTML and manual pages, cleaned."""

import gzip
import hashlib
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lxml import html

FILE_BYTES = (300, 200_000)  # shorter files are dropped, longer ones cut at a line
PACKAGE_BYTES = {"code": 3_200_000, "prose": 9_000_000}
VENDORED = re.compile(
    r"(_?vendor(ed)?|extern(als?)?|third_?party|node_modules|site-packages|_modules|migrations|"
    r"whatsnew|class-use|package-(use|tree)|locales?|releases|_static|changelogs?|"
    r"translations)(/|\.)",
    re.I,
)
LANGUAGE = re.compile(
    r"[/._-](ar|ca|cs|da|de|el|es|fi|fr|hu|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sv|tr|uk|vi|zh|sp)"
    r"([_-][a-z]{2,4})?[/.]",
    re.I,
)
GENERATED = re.compile(
    r"do not edit|auto-?generated|generated (by|from|with)|machine generated", re.I
)
LICENCE = re.compile(r"copyright|licen[sc]e|SPDX", re.I)
HEADER = re.compile(r"\A(?:(?:#[^\n]*)?\n)+")
MDOC = re.compile(r"\b(Bq|Er|Fa|Fn|Xr|Ar|Dq|Pa|Vt|Va|Nm|Li|Em|Sy|Ns|Pq|Cm|Fl|Ic|Dv|Ql|Oo|Oc) ")
COMMON = re.compile(
    r"\b(the|of|to|and|a|in|is|that|for|it|as|with|be|on|by|this|are|or|an|you|from|not|can|if)\b"
)
BLOCKS = set(
    "p div section article li dt dd tr table ul ol dl h1 h2 h3 h4 h5 h6 blockquote br hr"
    " title body page note info desc item".split()
)
SKIPPED = set("script style nav head header footer form button svg math info links".split())
CHROME = re.compile(
    r"sphinxsidebar|related|headerlink|navheader|navfooter|sidebar|toctree|topnav|"
    r"breadcrumb|footer|navset|contents-?list|docnav|page-header|^ path$|toplang|"
    r"titlenav"
)


def fraction(*parts: str) -> float:
    """A number in [0, 1) fixed by the parts: what splits and subsamples are drawn with."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def html_text(data: bytes) -> str:
    """The running text of a page: blocks on lines of their own, `pre` kept as it is."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    try:
        root = html.document_fromstring(re.sub(r"<\?xml[^>]*\?>", "", text))
    except Exception:  # lxml raises several classes for pages that are no pages
        return ""
    for path in ("//*[@role='main']", "//main", "//article", "//body"):
        if found := root.xpath(path):
            root = found[0]
            break
    out: list[str] = []

    def emit(text: str | None, verbatim: bool) -> None:
        if text and not verbatim:
            text = re.sub(r"\s+", " ", text)
            if not out or out[-1].endswith(("\n", " ")):
                text = text.lstrip()
        if text:
            out.append(text)

    def walk(node, verbatim: bool) -> None:
        tag = node.tag
        skip = (
            not isinstance(tag, str)
            or tag in SKIPPED
            or CHROME.search(f"{node.get('class', '')} {node.get('id', '')}")
        )
        if not skip:
            block = tag in BLOCKS or tag == "pre"
            verbatim_here = verbatim or tag == "pre"
            if block:
                out.append("\n- " if tag == "li" else "\n" if tag in ("br", "dd", "tr") else "\n\n")
            emit(node.text, verbatim_here)
            for child in node:
                walk(child, verbatim_here)
            if block:
                out.append("\n" if tag in ("li", "tr", "dd", "dt", "br") else "\n\n")
            elif tag in ("td", "th"):
                out.append(" ")
        emit(node.tail, verbatim)

    try:
        walk(root, False)
    except RecursionError:
        return ""
    text = "".join(out).replace("¶", "").replace("\xa0", " ")
    return re.sub(r"^- \s+", "- ", text, flags=re.M)


def man_text(text: str) -> str:
    """A manual page without its roff requests; good enough to read."""
    text = re.sub(
        r'^[.\'](\\"|de |if |ie |el |nr |ds |so |TH |in|ft|hy|ad|na|tr ).*\n', "", text, flags=re.M
    )
    text = re.sub(r"^\.S[HS] ?(.*)$", r"\n\1\n", text, flags=re.M)
    text = re.sub(r"^\.[A-Za-z]{1,2}(?: |$)(.*)$", lambda m: MDOC.sub("", m[1]), text, flags=re.M)
    text = re.sub(r"^-(\d+|\w+( -.*)?)$\n", "", text, flags=re.M)
    text = re.sub(r"\\f(\[\w*\]|\(\w\w|.)|\\[&|^c]", "", text)
    for escape, plain in (
        ("\\-", "-"),
        ("\\(aq", "'"),
        ("\\(bu", "*"),
        ("\\(em", " - "),
        ("\\e", "\\"),
        ("\\(lq", '"'),
        ("\\(rq", '"'),
        ("\\ ", " "),
    ):
        text = text.replace(escape, plain)
    return "" if text.count("\\(") + text.count("\\*") > 20 else text


def files(archive: Path, wanted: re.Pattern) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every regular file of a wheel or .deb whose name is wanted."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for item in wheel.infolist():
                if wanted.search(item.filename):
                    yield item.filename, wheel.read(item)
        return
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as unpack:
        with tarfile.open(fileobj=unpack.stdout, mode="r|") as tar:
            for item in tar:
                if item.isfile() and wanted.search(item.name):
                    data = tar.extractfile(item).read()
                    if item.name.endswith((".gz", ".dz")):
                        data = gzip.decompress(data)
                    yield item.name.removeprefix("./"), data


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, at most one empty line in a row (two in code)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def clean_code(text: str) -> str:
    """A source file without its licence header, or '' where it is not worth reading."""
    if GENERATED.search(text[:800]):
        return ""
    header = HEADER.match(text)
    if header and LICENCE.search(header[0]):
        text = text[header.end() :]
    digits = sum(map(text.count, "0123456789"))
    if max(map(len, text.splitlines() or [""])) > 1000 or digits > 0.12 * len(text):
        return ""
    return "" if len(text.encode()) > 1.05 * len(text) else tidy(text)


def clean_prose(text: str) -> str:
    """English running text, or '' where it is a table, a listing or another language."""
    text = re.sub(r"\n{3,}", "\n\n", tidy(text))
    words, digits = len(re.findall(r"[A-Za-z]+", text)), sum(map(text.count, "0123456789"))
    if words < 50 or digits > 0.07 * len(text) or len(text.encode()) > 1.05 * len(text):
        return ""
    running = sum(len(line) for line in text.split("\n") if len(line) >= 50)
    return text if len(COMMON.findall(text)) > 0.13 * words and running > 0.5 * len(text) else ""


def pieces(name: str, data: bytes, kind: str) -> Iterator[tuple[str, str]]:
    """Documents of one file: one, or, for a dictionary, runs of entries of about 30 kB."""
    text = data.decode("utf-8", "replace" if ".dict" in name else "ignore")
    if kind == "code":
        text = clean_code(text)
    elif ".dict.dz" in name:
        entries, size = re.split(r"\n(?=\S)", text), 0
        groups: dict[int, list[str]] = {}
        for entry in entries:
            groups.setdefault(size // 30_000, []).append(entry)
            size += len(entry)
        for index, group in groups.items():
            yield f"{name}#{index}", clean_prose("\n".join(group))
        return
    else:
        if name.endswith((".html", ".xhtml", ".htm", ".html.en", ".page")):
            text = html_text(data)
        elif "/man/" in name:
            text = man_text(text)
        text = clean_prose(text)
    if len(text) > FILE_BYTES[1]:
        text = text[: text.rindex("\n", 0, FILE_BYTES[1]) + 1]
    yield name, text


def documents(archive: Path, source: dict) -> list[tuple[str, str]]:
    """(path, text) of a package, program files before tests, in an order fixed by hashes."""
    kind = source["kind"]
    name_pattern = re.compile(source.get("paths", ""))
    suffix = re.compile(
        r"\.py$"
        if kind == "code"
        else r"\.(rst|txt|pod|page|x?html?|html\.en|dict\.dz|[1-9]\w*\.gz)(\.gz)?$"
    )
    found = []
    for name, data in files(archive, suffix):
        if (
            name_pattern.search(name)
            and not VENDORED.search(name)
            and not (kind == "prose" and LANGUAGE.search(name))
            and (len(data) >= FILE_BYTES[0])
        ):
            found.append((name, data))
    if kind == "prose" and any("/_sources/" in name for name, _ in found):
        found = [item for item in found if "/_sources/" in item[0]]  # HTML would repeat these
    found.sort(
        key=lambda item: (
            bool(re.search(r"(^|/|_)tests?([/_.]|$)", item[0])),
            fraction(source["name"], item[0]),
        )
    )
    kept, total = [], 0
    for name, data in found:
        for part, text in pieces(name, data, kind):
            if len(text) >= FILE_BYTES[0] and total < PACKAGE_BYTES[kind]:
                kept.append((part, text))
                total += len(text)
        if total >= PACKAGE_BYTES[kind]:
            break
    return kept
