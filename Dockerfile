# One image for every role: worker, sweeper, migrate, and the example peer.
# Pinned by digest: the tag says what it is, the digest which one.
ARG PYTHON=python:3.13-slim@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/coatcheck
# Dependencies change less often than the code, so they have a layer of their own.
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN python -m pip install --require-hashes --requirement requirements/build.txt \
    && /opt/coatcheck/bin/python -m pip install --require-hashes --requirement requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY worker worker
COPY broker broker
COPY store store
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/coatcheck/bin/python -m pip install --no-deps --no-index /dist/*.whl

FROM ${PYTHON}
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin coatcheck
COPY --from=build /opt/coatcheck /opt/coatcheck
COPY examples /app/examples
# PYTHONPATH lets `coatcheck worker package.module:app` find an application that was copied to /app.
ENV PATH=/opt/coatcheck/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER 10001
# The worker drains on SIGTERM: it stops consuming, finishes or puts down what it runs, and leaves.
STOPSIGNAL SIGTERM
CMD ["coatcheck", "--help"]
