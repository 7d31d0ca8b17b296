"""Commands of Shoal in processes of their own, each in a folder of its own, which join a run."""

import datetime
import ipaddress
import os
import subprocess
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from left_processes import ended_with_its_test
from shoal.net.client import TOKEN_VARIABLE
from shoal.net.listening import CERTIFICATE_VARIABLE, KEY_VARIABLE

TOKEN = "a token of this test"


def joining(folder: Path, *words: str, token: str = TOKEN, **environment: str) -> "subprocess.Popen[str]":
    """`shoal WORDS...` in a folder; its output goes to a file there."""
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("w") as output:
        return ended_with_its_test(
            subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", *words],
                cwd=folder,
                env={**os.environ, TOKEN_VARIABLE: token, **environment},
                stdout=output,
                stderr=output,
                text=True,
            )
        )


def certified(folder: Path, address: str = "127.0.0.1") -> dict[str, str]:
    """Environment of a host with a certificate for its address, which it also trusts."""
    folder.mkdir(exist_ok=True)
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, encoding = folder / "certificate.pem", serialization.Encoding.PEM
    pem.write_bytes(certificate.public_bytes(encoding))
    plain = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(plain)
    return {CERTIFICATE_VARIABLE: str(pem), KEY_VARIABLE: str(folder / "key.pem"), "SSL_CERT_FILE": str(pem)}
