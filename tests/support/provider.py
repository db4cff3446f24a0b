"""An OpenID Connect provider on 127.0.0.1: discovery, keys, login page, code flow with PKCE (S256),
ID tokens signed with RS256, end of session. Refuses what the standard says to refuse.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT = "counterpoise"
CODE_LIFE_S = 60.0


class Provider:
    """Knows `people` (e-mail address -> groups); one client, with `client_secret`."""

    def __init__(self, people: Mapping[str, Sequence[str]], redirect_uri: str) -> None:
        self.people = people
        self.redirect_uri = redirect_uri
        self.client_secret = secrets.token_urlsafe(24)
        self.key = RSAKey.generate_key(2048, parameters={"kid": "k1", "use": "sig"})
        self.issued_ago_s = 0.0
        self._codes: dict[str, tuple[float, dict[str, str]]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.issuer = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def secrets_toml(self, cookie_secret: str) -> str:
        """What a dashboard needs to sign people in here."""
        return (
            f'[auth]\nredirect_uri = "{self.redirect_uri}"\ncookie_secret = "{cookie_secret}"\n'
            f'client_id = "{CLIENT}"\nclient_secret = "{self.client_secret}"\n'
            f'server_metadata_url = "{self.issuer}/.well-known/openid-configuration"\n'
        )

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "end_session_endpoint": f"{self.issuer}/end",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
            "scopes_supported": ["openid", "email", "profile"],
        }

    def keys(self) -> dict[str, Any]:
        return {"keys": [self.key.as_dict(private=False)]}

    def asked_wrongly(self, query: Mapping[str, str]) -> str:
        """Why a request for authorisation is refused, "" when it is a good one."""
        if query.get("client_id") != CLIENT or query.get("redirect_uri") != self.redirect_uri:
            return "unknown client or redirect_uri"
        if query.get("response_type") != "code" or "openid" not in query.get("scope", "").split():
            return "not a request for a code with scope openid"
        if query.get("code_challenge_method") != "S256" or not query.get("code_challenge"):
            return "no PKCE challenge"
        return "" if query.get("state") and query.get("nonce") else "no state or nonce"

    def code_for(self, who: str, query: Mapping[str, str]) -> str:
        code = secrets.token_urlsafe(16)
        self._codes[code] = (time.time(), dict(query) | {"who": who})
        return code

    def token(self, form: Mapping[str, str], authorization: str) -> dict[str, Any] | None:
        """The tokens for a code, once; None for a wrong client, code or verifier."""
        client, secret = form.get("client_id", ""), form.get("client_secret", "")
        if authorization.startswith("Basic "):
            decoded = base64.b64decode(authorization.removeprefix("Basic ")).decode()
            client, secret = (unquote(part) for part in decoded.split(":", 1))
        at, asked = self._codes.pop(form.get("code", ""), (0.0, {}))
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            client != CLIENT
            or not hmac.compare_digest(secret, self.client_secret)
            or time.time() - at > CODE_LIFE_S
            or form.get("redirect_uri") != self.redirect_uri
            or challenge != asked["code_challenge"]
        ):
            return None
        now = int(time.time() - self.issued_ago_s)
        claims = {
            "iss": self.issuer, "aud": CLIENT, "sub": f"id-{asked['who']}", "iat": now,
            "exp": int(time.time()) + 600, "nonce": asked["nonce"], "email": asked["who"],
            "email_verified": True, "groups": list(self.people[asked["who"]]),
        }  # fmt: skip
        id_token = jwt.encode({"alg": "RS256", "kid": "k1"}, claims, self.key)
        access = secrets.token_urlsafe(16)
        return {"access_token": access, "token_type": "Bearer", "expires_in": 600,
                "id_token": id_token}  # fmt: skip


def _handler(provider: Provider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            if address.path == "/.well-known/openid-configuration":
                self._json(provider.metadata())
            elif address.path == "/keys":
                self._json(provider.keys())
            elif address.path == "/authorize":
                self._login_page(query)
            elif address.path == "/login" and query.get("who") in provider.people:
                self._signed_in(query)
            elif address.path == "/end":
                self._redirect(query.get("post_logout_redirect_uri", "/"))
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            tokens = provider.token(form, self.headers.get("Authorization", ""))
            if self.path != "/token" or tokens is None:
                self._json({"error": "invalid_grant"}, 400)
            else:
                self._json(tokens)

        def _login_page(self, query: Mapping[str, str]) -> None:
            if why := provider.asked_wrongly(query):
                self.send_error(400, why)
                return
            links = "".join(
                f'<p><a href="/login?{html.escape(urlencode({**query, "who": who}))}">{who}</a></p>'
                for who in provider.people
            )
            self._body(f"<title>Sign in</title><h1>Who are you?</h1>{links}".encode(), "text/html")

        def _signed_in(self, query: Mapping[str, str]) -> None:
            if why := provider.asked_wrongly(query):
                self.send_error(400, why)
                return
            back = {"code": provider.code_for(query["who"], query), "state": query["state"]}
            self._redirect(f"{provider.redirect_uri}?{urlencode(back)}")

        def _redirect(self, to: str) -> None:
            self.send_response(302)
            self.send_header("Location", to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _json(self, value: object, status: int = 200) -> None:
            self._body(json.dumps(value).encode(), "application/json", status)

        def _body(self, body: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the tests look at what comes of it."""

    return Handler
