"""Public schemas of the papers' tables (UCI and others).

These are public benchmarks, and their vocabularies and bounds were chosen with the rows in view: round numbers, but
some (density, nr.employed, the fraud components) are as narrow as they are only because the data are known. They
are constants of the benchmark, not a model for private data. Values beyond a bound are clipped.
"""

from __future__ import annotations

from quietgrad.data.schema import Categorical, Numeric, Schema

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_JOBS = (
    "admin.", "blue-collar", "entrepreneur", "housemaid", "management", "retired", "self-employed", "services",
    "student", "technician", "unemployed", "unknown",
)  # fmt: skip
_NO_YES = ("no", "yes")


def _first_dropped(*words: str) -> Categorical:
    return Categorical(words, drop_first=True)


def _codes(low: int, high: int) -> Categorical:
    return Categorical(tuple(str(k) for k in range(low, high + 1)))


BANK = Schema(
    columns={
        "age": Numeric((0, 100)),
        "job": _first_dropped(*_JOBS),
        "marital": _first_dropped("divorced", "married", "single"),
        "education": _first_dropped("primary", "secondary", "tertiary", "unknown"),
        "default": _first_dropped(*_NO_YES),
        "balance": Numeric((-10_000, 100_000)),
        "housing": _first_dropped(*_NO_YES),
        "loan": _first_dropped(*_NO_YES),
        "contact": _first_dropped("cellular", "telephone", "unknown"),
        "day": Numeric((1, 31)),
        "month": _first_dropped(*_MONTHS),
        "duration": Numeric((0, 3600)),
        "campaign": Numeric((1, 50)),
        "pdays": Numeric((-1, 999)),
        "previous": Numeric((0, 50)),
        "poutcome": _first_dropped("failure", "other", "success", "unknown"),
    },
    label="y",
    classes=_NO_YES,
    delimiter=";",
)
"""Bank marketing: 42 features, each category's first word left out as in the paper."""

BANK_ADDITIONAL = Schema(
    columns={
        "age": Numeric((0, 100)),
        "job": Categorical(_JOBS),
        "marital": Categorical(("divorced", "married", "single", "unknown")),
        "education": Categorical(
            (
                "basic.4y", "basic.6y", "basic.9y", "high.school", "illiterate", "professional.course",
                "university.degree", "unknown",
            )
        ),
        "default": Categorical((*_NO_YES, "unknown")),
        "housing": Categorical((*_NO_YES, "unknown")),
        "loan": Categorical((*_NO_YES, "unknown")),
        "contact": Categorical(("cellular", "telephone")),
        "month": Categorical(_MONTHS),
        "day_of_week": Categorical(("mon", "tue", "wed", "thu", "fri")),
        "duration": Numeric((0, 3600)),
        "campaign": Numeric((1, 50)),
        "pdays": Numeric((0, 999)),
        "previous": Numeric((0, 10)),
        "poutcome": Categorical(("failure", "nonexistent", "success")),
        "emp.var.rate": Numeric((-5, 5)),
        "cons.price.idx": Numeric((90, 100)),
        "cons.conf.idx": Numeric((-60, 0)),
        "euribor3m": Numeric((0, 6)),
        "nr.employed": Numeric((4900, 5300)),
    },
    label="y",
    classes=_NO_YES,
    delimiter=";",
)  # fmt: skip
"""Bank marketing with economic indicators: 65 features."""

_MONEY = 1_000_000
CREDIT_DEFAULT = Schema(
    columns={
        "LIMIT_BAL": Numeric((0, _MONEY)),
        "SEX": _codes(1, 2),
        "EDUCATION": _codes(0, 6),
        "MARRIAGE": _codes(0, 3),
        "AGE": Numeric((0, 100)),
        **{f"PAY_{k}": Numeric((-2, 9)) for k in (0, 2, 3, 4, 5, 6)},
        **{f"BILL_AMT{k}": Numeric((-100_000, _MONEY)) for k in range(1, 7)},
        **{f"PAY_AMT{k}": Numeric((0, _MONEY), log=True) for k in range(1, 7)},
    },
    label="Default",
    classes=("0", "1"),
)
"""Default of credit card clients: 33 features."""

WINE = Schema(
    columns={
        "fixed acidity": Numeric((0, 20)),
        "volatile acidity": Numeric((0, 2)),
        "citric acid": Numeric((0, 2)),
        "residual sugar": Numeric((0, 50)),
        "chlorides": Numeric((0, 0.5)),
        "free sulfur dioxide": Numeric((0, 150)),
        "total sulfur dioxide": Numeric((0, 400)),
        "density": Numeric((0.98, 1.01)),
        "pH": Numeric((2.5, 4.5)),
        "sulphates": Numeric((0, 2)),
        "alcohol": Numeric((8, 15)),
    },
    label="quality",
    label_bounds=(0, 10),
    delimiter=";",
)
"""Wine quality, red and white together: 11 features."""

BIKE = Schema(
    columns={
        "season": _codes(1, 4),
        "yr": _codes(0, 1),
        "mnth": _codes(1, 12),
        "hr": _codes(0, 23),
        "holiday": _codes(0, 1),
        "weekday": _codes(0, 6),
        "workingday": _codes(0, 1),
        "weathersit": _codes(1, 4),
        "temp": Numeric((0, 1)),
        "atemp": Numeric((0, 1)),
        "hum": Numeric((0, 1)),
        "windspeed": Numeric((0, 1)),
    },
    label="cnt",
    label_bounds=(0, 1000),
)
"""Hourly bike sharing: 61 features. Dates and the counts that add up to the target are left out."""

BREAST_CANCER_WISCONSIN = Schema(
    columns={f"V{k}": Numeric((1, 10)) for k in range(1, 10)},
    label="class",
    classes=("benign", "malignant"),
    drop_incomplete=True,
)
"""Breast cancer Wisconsin (original): nine grades from 1 to 10; rows with a gap are left out."""

CREDIT_FRAUD = Schema(
    columns={
        "Time": Numeric((0, 172_800)),
        **{f"V{k}": Numeric((-20, 20)) for k in range(1, 29)},
        "Amount": Numeric((0, 25_000), log=True),
    },
    label="Class",
    classes=("0", "1"),
)
"""Credit card fraud, balanced: 30 features."""

_KDD_COUNTS = {
    "duration": 60_000, "src_bytes": 1e9, "dst_bytes": 1e9, "wrong_fragment": 3, "urgent": 10, "hot": 100,
    "num_failed_logins": 10, "num_compromised": 1000, "su_attempted": 2, "num_root": 1000,
    "num_file_creations": 100, "num_shells": 10, "num_access_files": 10, "num_outbound_cmds": 10,
}  # fmt: skip
_KDD_NAMES = (
    "duration", "protocol_type", "service", "flag", "src_bytes", "dst_bytes", "land", "wrong_fragment",
    "urgent", "hot", "num_failed_logins", "logged_in", "num_compromised", "root_shell", "su_attempted",
    "num_root", "num_file_creations", "num_shells", "num_access_files", "num_outbound_cmds",
    "is_host_login", "is_guest_login", "count", "srv_count", "serror_rate", "srv_serror_rate",
    "rerror_rate", "srv_rerror_rate", "same_srv_rate", "diff_srv_rate", "srv_diff_host_rate",
    "dst_host_count", "dst_host_srv_count", "dst_host_same_srv_rate", "dst_host_diff_srv_rate",
    "dst_host_same_src_port_rate", "dst_host_srv_diff_host_rate", "dst_host_serror_rate",
    "dst_host_srv_serror_rate", "dst_host_rerror_rate", "dst_host_srv_rerror_rate", "label",
)  # fmt: skip
_KDD_SERVICES = (
    "IRC", "X11", "Z39_50", "aol", "auth", "bgp", "courier", "csnet_ns", "ctf", "daytime", "discard",
    "domain", "domain_u", "echo", "eco_i", "ecr_i", "efs", "exec", "finger", "ftp", "ftp_data", "gopher",
    "harvest", "hostnames", "http", "http_2784", "http_443", "http_8001", "imap4", "iso_tsap", "klogin",
    "kshell", "ldap", "link", "login", "mtp", "name", "netbios_dgm", "netbios_ns", "netbios_ssn", "netstat",
    "nnsp", "nntp", "ntp_u", "other", "pm_dump", "pop_2", "pop_3", "printer", "private", "red_i",
    "remote_job", "rje", "shell", "smtp", "sql_net", "ssh", "sunrpc", "supdup", "systat", "telnet",
    "tftp_u", "tim_i", "time", "urh_i", "urp_i", "uucp", "uucp_path", "vmnet", "whois",
)  # fmt: skip


def _kdd_column(column: str) -> Numeric | Categorical:
    if column == "protocol_type":
        return Categorical(("icmp", "tcp", "udp"))
    if column == "service":
        return Categorical(_KDD_SERVICES)
    if column == "flag":
        return Categorical(("OTH", "REJ", "RSTO", "RSTOS0", "RSTR", "S0", "S1", "S2", "S3", "SF", "SH"))
    if column in _KDD_COUNTS:
        return Numeric((0, _KDD_COUNTS[column]), log=True)
    if column in ("count", "srv_count"):
        return Numeric((0, 511))
    if column in ("dst_host_count", "dst_host_srv_count"):
        return Numeric((0, 255))
    return Numeric((0, 1))  # the remaining columns are rates and flags


KDD = Schema(
    columns={c: _kdd_column(c) for c in _KDD_NAMES[:-1]},
    label="label",
    classes=("normal", "attack"),
    names=_KDD_NAMES,
)
"""KDD Cup 99: 41 columns, any attack against normal traffic."""
