"""Files with certificates and keys, correct and wrong ones."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from router.settings import SettingsError, load_certificate, read_authorities
from tests.support.certificates import Certificate, make_certificate, make_key


@pytest.fixture
def made(tmp_path: Path) -> Certificate:
    """A certificate and its key."""
    return make_certificate(tmp_path)


def load(certfile: Path, keyfile: Path | str) -> None:
    load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), str(certfile), str(keyfile))


def damage(path: Path) -> None:
    """Remove the third line of a file."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))


def test_a_certificate_and_its_key_can_be_in_two_files_or_in_one(made: Certificate, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text("for people\n" + made.certfile.read_text() + made.keyfile.read_text())
    load(made.certfile, made.keyfile)
    load(both, "")


def another_key(made: Certificate) -> str:
    make_key(made.keyfile)
    return "the key in server.ssl-keyfile {key} is not the key of the certificate in server.ssl-certfile {cert}"


def a_key_of_another_algorithm(made: Certificate) -> str:
    make_key(made.keyfile, "ED25519")
    return "the key in server.ssl-keyfile {key} is not the key of the certificate in server.ssl-certfile {cert}"


def a_key_with_a_password(made: Certificate) -> str:
    make_key(made.keyfile, password="secret")
    return "the key in server.ssl-keyfile {key} has a password; write it without: openssl pkey -in KEY -out NEW_KEY"


def no_certificate_file(made: Certificate) -> str:
    made.certfile.unlink()
    return "server.ssl-certfile {cert}: No such file or directory"


def no_key_file(made: Certificate) -> str:
    made.keyfile.unlink()
    return "server.ssl-keyfile {key}: No such file or directory"


def swapped_files(made: Certificate) -> str:
    swapped = made.keyfile.read_text(), made.certfile.read_text()
    made.certfile.write_text(swapped[0])
    made.keyfile.write_text(swapped[1])
    return "server.ssl-certfile {cert} has no certificate in it, which would begin with '-----BEGIN CERTIFICATE-----'"


def no_key_in_the_file(made: Certificate) -> str:
    made.keyfile.write_text("")
    return "server.ssl-keyfile {key} has no private key in it, which would begin with '-----BEGIN PRIVATE KEY-----'"


def a_damaged_certificate(made: Certificate) -> str:
    damage(made.certfile)
    return "the certificate in server.ssl-certfile {cert} is damaged"


def a_damaged_key(made: Certificate) -> str:
    made.keyfile.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    return "the key in server.ssl-keyfile {key} is damaged"


@pytest.mark.parametrize(
    "spoil",
    [
        *(
            another_key,
            a_key_of_another_algorithm,
            a_key_with_a_password,
            no_certificate_file,
            no_key_file,
            swapped_files,
        ),
        *(no_key_in_the_file, a_damaged_certificate, a_damaged_key),
    ],
)
def test_the_error_for_unusable_files_is_one_sentence(made: Certificate, spoil: Callable[[Certificate], str]) -> None:
    message = spoil(made).format(cert=made.certfile, key=made.keyfile)
    with pytest.raises(SettingsError) as refused:
        load(made.certfile, made.keyfile)
    assert str(refused.value) == message


def test_the_error_for_a_file_without_a_key_names_the_setting_for_it(made: Certificate) -> None:
    with pytest.raises(SettingsError, match=r"has no private key in it, .*; name its file with server\.ssl-keyfile"):
        load(made.certfile, "")


class TestAuthorities:
    def test_only_the_authorities_of_the_file_are_trusted(self, made: Certificate) -> None:
        context = read_authorities(str(made.certfile), "manager.instance-ca-file")
        (authority,) = context.get_ca_certs()
        assert authority["subject"] == ((("commonName", "router"),),)
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (Path.unlink, "manager.instance-ca-file {}: No such file or directory"),
            (damage, "a certificate in manager.instance-ca-file {} is damaged"),
            (
                lambda path: path.write_text("x"),
                "manager.instance-ca-file {} has no certificate in it, which would begin with "
                "'-----BEGIN CERTIFICATE-----'",
            ),
        ],
    )
    def test_the_error_for_an_unusable_file_is_one_sentence(
        self, made: Certificate, spoil: Callable[[Path], object], message: str
    ) -> None:
        spoil(made.certfile)
        with pytest.raises(SettingsError) as refused:
            read_authorities(str(made.certfile), "manager.instance-ca-file")
        assert str(refused.value) == message.format(made.certfile)
