# One image for controller, agent, recorder and app. With NVIDIA GPUs build it with a matching torch:
#   docker compose build --build-arg TORCH_BACKEND=cu130
FROM python:3.13-slim

ARG TORCH_BACKEND=cpu
ENV PYTHONUNBUFFERED=1 \
    COUNTERPOISE_HOME=/var/lib/counterpoise

WORKDIR /opt/counterpoise
COPY constraints.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check -c constraints.txt uv

# The dependencies are a layer of their own: they change far less often than the code.
COPY pyproject.toml ./
RUN uv pip install --system --no-cache --compile-bytecode --torch-backend "$TORCH_BACKEND" \
    -c constraints.txt -r pyproject.toml

COPY README.md counterpoise.py ./
COPY storage storage
COPY runtime runtime
COPY app app
RUN uv pip install --system --no-cache --compile-bytecode --no-deps \
    --build-constraints constraints.txt .

RUN useradd --system --uid 10001 --home-dir /var/lib/counterpoise --create-home counterpoise
USER counterpoise
WORKDIR /var/lib/counterpoise
VOLUME /var/lib/counterpoise

ENTRYPOINT ["counterpoise"]
CMD ["--help"]
