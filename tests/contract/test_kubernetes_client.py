"""Whose certificates are trusted."""

import types
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stoker.platforms.kubernetes.api import CONFIG_MAPS, ClusterApi
from support.kubernetes_api import kube_config, kubernetes_api
from support.platform_jobs import use_kube_config

KEY = ec.generate_private_key(ec.SECP256R1())
AUTHORITY = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])


def certificate(name: x509.Name, *, is_authority: bool) -> bytes:
    """Returns a certificate without key usage and key identifiers, signed by the authority."""
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(AUTHORITY)
        .public_key(KEY.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if not is_authority:
        address = x509.IPAddress(ip_address("127.0.0.1"))
        made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return made.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def authority(tmp_path):
    path = tmp_path / "ca.crt"
    path.write_bytes(certificate(AUTHORITY, is_authority=True))
    return path


@pytest.fixture
def tls_api(tmp_path):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-apiserver")])
    (tmp_path / "server.crt").write_bytes(certificate(name, is_authority=False))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    (tmp_path / "server.key").write_bytes(KEY.private_bytes(*form, serialization.NoEncryption()))
    with kubernetes_api(tls=(tmp_path / "server.crt", tmp_path / "server.key")) as found:
        yield found


@pytest.fixture(params=[(3, 11), (3, 13)], ids=["python3.11", "python3.13"])
def python(request, monkeypatch):
    """Has urllib3 make its TLS contexts as under that Python."""
    told = types.SimpleNamespace(version_info=request.param)
    monkeypatch.setattr("urllib3.util.ssl_.sys", told)


@pytest.mark.usefixtures("python")
def test_an_authority_without_key_usage_is_trusted_as_kubectl_trusts_it(
    tls_api, authority, tmp_path, monkeypatch
):
    use_kube_config(monkeypatch, kube_config(tmp_path, tls_api.url, authority=authority))
    assert ClusterApi().find(CONFIG_MAPS, "none") is None
    assert tls_api.count("GET") == 1
