"""Columns that name rows or people, known by their names and by how often their values repeat.

A column of people's ids with several rows each changes the guarantee: without it ε holds for one row. So a name is
read word by word, however it is written, and a column whose values repeat as ids do is named whatever it is called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_WHOLE = re.compile(r"[+-]?\d{1,18}")
_CODE = re.compile(r"[A-Za-z]{1,4}[-_]?\d{3,12}")
_PARTS = re.compile(r"[A-ZÄÖÜ]+(?![a-zäöüß])|[A-ZÄÖÜ]?[^\W\d_A-ZÄÖÜ]+|\d+")

_PEOPLE = (
    "person", "patient", "customer", "client", "user", "member", "subject", "household", "pupil", "respondent",
    "participant", "employee", "student", "citizen", "donor", "tenant", "voter", "applicant", "borrower",
    "policyholder", "cardholder", "subscriber", "panelist",
    "proband", "teilnehmer", "teilnehmerin", "kunde", "kunden", "mitarbeiter", "versicherter", "versicherten",
    "mandant", "klient", "schüler", "schueler", "haushalt", "bewohner", "mitglied", "mitglieds",
    "paciente", "cliente", "usuario", "empleado", "alumno", "persona", "pazienti", "paziente", "patiënt", "klant",
    "patienten", "deelnemer", "kund", "pasient", "deltager", "deltagare", "elev", "participante", "salarié",
    "salarie", "abonné", "abonne", "adhérent", "adherent",
)  # fmt: skip
_WITH_NUMBERS = (*_PEOPLE, "personal", "account", "policy", "staff", "individual", "insured", "worker", "case")
"""Words that name people's ids with a word for a number after them, and alone may be anything."""
_NUMBERS = (
    "id", "ids", "uuid", "guid", "nr", "no", "num", "number", "nummer", "nro", "numero", "número", "numéro", "key",
    "code", "kennung", "identifier", "ident", "hash", "pseudonym", "ref",
)  # fmt: skip
_ALONE = frozenset((
    "id", "ids", "uuid", "guid", "uid", "pid", "mrn", "ssn", "nhs", "cpf", "cpr", "bsn", "ahv", "nino", "dni",
    "nif", "curp", "svnr", "empi", "personnummer", "fodselsnummer", "pseudonym", "identifier", "passport", "iban",
))  # fmt: skip
_ENDING = "(?:e?n|e?s|in|e)?"
_OF_PEOPLE = re.compile(rf"(?:{'|'.join(_WITH_NUMBERS)}){_ENDING}(?:{'|'.join(_NUMBERS)})")
_OF_ROWS = frozenset(("id", "nr", "no", "key", "uuid", "number", "nummer", "code"))
_FEWEST = 100  # different values of a column that may be ids
_LEAST_ROWS, _MOST_ROWS = 1.2, 20  # rows of each value on average
_UNEVEN = 5.0  # times the average that a value of ids has at most


def words_of(name: str) -> list[str]:
    """The words of a column's name, in lower case.

    >>> words_of("PatientID"), words_of("Patienten-Nr"), words_of("customer_no")
    (['patient', 'id'], ['patienten', 'nr'], ['customer', 'no'])
    """
    return [part.lower() for part in _PARTS.findall(name)]


def is_called_people(name: str) -> bool:
    """Whether a name says that a column holds ids, or people.

    >>> [name for name in ("PatientID", "userid", "Kundennummer", "MRN", "paid") if is_called_people(name)]
    ['PatientID', 'userid', 'Kundennummer', 'MRN']
    """
    words = words_of(name)
    if not words:
        return False
    if words[-1] in _ALONE or words[-1] in _PEOPLE:
        return True
    if words[-1] in _NUMBERS and words[-2:-1] and words[-2] in _ALONE:
        return True
    return any(_OF_PEOPLE.fullmatch("".join(words[start:])) for start in range(len(words)))


def is_id_column(name: str, filled: Sequence[str], words: set[str]) -> bool:
    """Whether a column names its rows, or people with several rows each.

    Every cell is another, in a column that is called an id, numbers the rows, or holds no ordinary numbers or
    words; or many values repeat, and they are codes such as P0042, or the column is called an id or people.
    """
    if len(filled) < 20:
        return False
    called = is_called_people(name)
    if len(words) < len(filled):
        return bool(called or all(map(_CODE.fullmatch, words))) and len(words) > max(20, len(filled) // 50)
    if filled[0] in ("0", "1") and list(filled) == [str(int(filled[0]) + k) for k in range(len(filled))]:
        return True  # rows are numbered through
    named = words_of(name)
    if called or (named and named[-1] in _OF_ROWS):
        return True
    return not any(_is_plain(word) or " " in word for word in words)


def may_be_ids(filled: Sequence[str]) -> bool:
    """Whether values repeat as ids of people do: many of them, each in a few rows, none in very many.

    Numbers must be whole ones. Measured numbers repeat unevenly, so most of them are told apart.
    """
    rows = Counter(filled)
    if len(rows) < _FEWEST or len(rows) >= len(filled):
        return False
    if any(_is_plain(value) and not _WHOLE.fullmatch(value) for value in rows):
        return False
    average = len(filled) / len(rows)
    return _LEAST_ROWS <= average <= _MOST_ROWS and max(rows.values()) <= _UNEVEN * average + _UNEVEN


def _is_plain(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
