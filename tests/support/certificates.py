"""Two self-signed certificates for localhost and 127.0.0.1, made for these tests alone."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    certificate: str
    key: str

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The paths of the certificate and of its key."""
        paths = folder / "cert.pem", folder / "key.pem"
        for path, text in zip(paths, (self.certificate, self.key), strict=True):
            path.write_text(text)
        return paths

    def client_context(self) -> ssl.SSLContext:
        """Trusts this certificate and no other."""
        return ssl.create_default_context(cadata=self.certificate)


FIRST = Certificate(
    """\
-----BEGIN CERTIFICATE-----
MIIBpzCCAU2gAwIBAgIUX4o4slM5uNoyVPpP4CP1/cL9kYUwCgYIKoZIzj0EAwIw
GjEYMBYGA1UEAwwPbG9va29uY2UgdGVzdCAxMCAXDTI2MTEyMjE4MTQyNFoYDzIx
MjYxMDI5MTgxNDI0WjAaMRgwFgYDVQQDDA9sb29rb25jZSB0ZXN0IDEwWTATBgcq
hkjOPQIBBggqhkjOPQMBBwNCAARh7mNs3uBqr6ZPHh0Vd2vxF3wQkea5iXiH/fbk
M+goqLbvus+regdWB3kuaw8L5roTWZaBdka+9AgY/x2cmNGSo28wbTAdBgNVHQ4E
FgQUxrGPWsvqsWF0ZcAgidmKa1ocFCswHwYDVR0jBBgwFoAUxrGPWsvqsWF0ZcAg
idmKa1ocFCswDwYDVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SH
BH8AAAEwCgYIKoZIzj0EAwIDSAAwRQIhAMGLm9UlhAhms3LcomPFFeKeZ0KAlwQv
+FuTn0K1xcvkAiBjHhSFKr8BM0Bo4syw4EhMZB8YjlhHp93DWPrRcTZ+Jg==
-----END CERTIFICATE-----
""",
    """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgoSxJJ0Bt75ZieF7/
APjjBMcmGQrF6FaWyw269TPbc7GhRANCAARh7mNs3uBqr6ZPHh0Vd2vxF3wQkea5
iXiH/fbkM+goqLbvus+regdWB3kuaw8L5roTWZaBdka+9AgY/x2cmNGS
-----END PRIVATE KEY-----
""",
)
SECOND = Certificate(
    """\
-----BEGIN CERTIFICATE-----
MIIBqDCCAU2gAwIBAgIUGsribLXVAwzmpsIFZzmEo43bGqEwCgYIKoZIzj0EAwIw
GjEYMBYGA1UEAwwPbG9va29uY2UgdGVzdCAyMCAXDTI2MTEyMjE4MTQyNFoYDzIx
MjYxMDI5MTgxNDI0WjAaMRgwFgYDVQQDDA9sb29rb25jZSB0ZXN0IDIwWTATBgcq
hkjOPQIBBggqhkjOPQMBBwNCAASFZpjCs0g3BNHDyGFOTw5oceYZRdccB6gsHQKF
4gqWaGpzA9YnH9EVx5tBgz5uKh4TIKLtY5cn2byAZFIb9Ii6o28wbTAdBgNVHQ4E
FgQU3NXlTnVtOi6hxeRxjgOtsUE7rs4wHwYDVR0jBBgwFoAU3NXlTnVtOi6hxeRx
jgOtsUE7rs4wDwYDVR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SH
BH8AAAEwCgYIKoZIzj0EAwIDSQAwRgIhAPZFm+dTqQezAg6kEMbLtSy9zoLeGoq9
nEPYW121K3Z8AiEA7xOxBDn/1SzcO8t9qbORAtx8BZJLuxeID5qZp2tHoNw=
-----END CERTIFICATE-----
""",
    """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg97xHx3HmqGQnw1Tu
Wu4AcrX4pCHSdl/kLOwr5wyawv+hRANCAASFZpjCs0g3BNHDyGFOTw5oceYZRdcc
B6gsHQKF4gqWaGpzA9YnH9EVx5tBgz5uKh4TIKLtY5cn2byAZFIb9Ii6
-----END PRIVATE KEY-----
""",
)
