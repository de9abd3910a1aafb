"""TLS to either server: contexts made from files, and failed handshakes explained in words that say what to do.

Certificates are verified unless an option says otherwise. The oldest accepted version is TLS 1.2.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coatcheck.errors import InvalidSettings

_NOT_YET_VALID = 9
_EXPIRED = 10
_OTHER_NAME = 62
_OTHER_ADDRESS = 64
# Answers of a server that requires a certificate of ours and got none, or the wrong one.
_REFUSALS_OF_OURS = (
    "CERTIFICATE_REQUIRED",
    "HANDSHAKE_FAILURE",
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_REVOKED",
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE")


@dataclass(frozen=True, slots=True)
class Options:
    """The names of the options of an address: users of each server know them by other names."""

    ca: str
    cert: str
    key: str


POSTGRES_OPTIONS = Options(ca="sslrootcert", cert="sslcert", key="sslkey")
SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def make_context(
    options: Options,
    *,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
    verifies: bool = True,
    checks_name: bool = True,
) -> ssl.SSLContext:
    """Make the context of a client. Without a CA file the system's CAs are trusted.

    Raises InvalidSettings that names the option whose file cannot be used.
    """
    if key is not None and cert is None:
        raise InvalidSettings(f"{options.key} needs a certificate: give {options.cert} too")
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettings(f"{options.ca}={ca}: {_reason(error)}; it must be a file of CA certificates") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = verifies and checks_name
    context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
    if cert is not None:
        try:
            # Without a password callback OpenSSL would ask on the terminal.
            context.load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            files = f"{options.cert}={cert}" + (f", {options.key}={key}" if key else "")
            raise InvalidSettings(
                f"{files}: {_reason(error)}; they must be a certificate and its unencrypted key, as PEM"
            ) from None
    return context


def postgres_ssl(mode: str, files: Mapping[str, str], *, what: str) -> ssl.SSLContext | str:
    """Return what asyncpg takes for `sslmode` and its files. As in libpq, `require` verifies the CA if one is named,
    `verify-full` the name too. `what` names the address in an error. Raises InvalidSettings.
    """
    if mode not in SSL_MODES:
        raise InvalidSettings(f"sslmode in the {what} must be one of {', '.join(SSL_MODES)}")
    if mode in ("disable", "allow", "prefer"):
        if files:
            raise InvalidSettings(f"{', '.join(files)} in the {what}: TLS is not sure with sslmode={mode}")
        return mode
    return make_context(
        POSTGRES_OPTIONS,
        ca=files.get(POSTGRES_OPTIONS.ca),
        cert=files.get(POSTGRES_OPTIONS.cert),
        key=files.get(POSTGRES_OPTIONS.key),
        verifies=mode != "require" or POSTGRES_OPTIONS.ca in files,
        checks_name=mode == "verify-full",
    )


def explain(error: BaseException, options: Options) -> str | None:
    """Say what a failed handshake means and what to do about it; None if it is not about TLS."""
    found = next((each for each in _chain(error) if isinstance(each, ssl.SSLError)), None)
    if isinstance(found, ssl.SSLCertVerificationError):
        return _explain_theirs(found, options)
    reason = "" if found is None else (found.reason or "")
    if any(word in reason for word in _REFUSALS_OF_OURS):
        return (
            f"the server does not accept our certificate, or wants one and got none ({reason}); "
            f"give one it accepts with {options.cert}= and {options.key}="
        )
    if any(word in reason for word in _NO_TLS):
        return f"the server does not speak TLS there ({reason}); correct the port or the server's configuration"
    return None


def is_verification_failure(error: BaseException) -> bool:
    """Tell whether the server has the wrong certificate or name: waiting does not help, a person must look."""
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in _chain(error))


def is_local(host: str | None) -> bool:
    """Tell whether a host is this machine, by its name alone: loopback, or the path of a Unix socket."""
    if not host or host.startswith("/"):
        return True
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _explain_theirs(error: ssl.SSLCertVerificationError, options: Options) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "the server's certificate has expired; renew it"
        case code if code == _NOT_YET_VALID:
            return "the server's certificate is not valid yet; look at the clocks of both machines"
        case code if code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"the server's certificate is made for another name ({error.verify_message}); "
                "connect by the name it is made for"
            )
        case _:
            return (
                f"the server's certificate is signed by a CA that is not trusted here ({error.verify_message}); "
                f"name the file of its CA with {options.ca}="
            )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
