# An image with models, and what XLA compiled of them, which starts in seconds. Its context is a folder with a
# configuration, and models if they are yours; copy this file beside them, and change it:
#   docker build --file deploy/models.Dockerfile --build-arg CONFIG=demo.yaml --tag demo deploy
# Build it on the kind of processor, and with as many cores, as it will run with: elsewhere it compiles again. So it does with
# other `engines` than the configuration has.
ARG IMAGE=xlaserve:latest
FROM ${IMAGE}
ARG CONFIG=xlaserve.yaml
COPY ${CONFIG} /etc/xlaserve/xlaserve.yaml
# COPY models /mnt/models
ENV XLASERVE_COMPILE_CACHE=/var/cache/xlaserve
# As root, so that the server can't change what it runs.
USER root
RUN xlaserve warm --config /etc/xlaserve/xlaserve.yaml
USER 65532:65532
ENV XLASERVE_COMPILE_CACHE_READ_ONLY=true
CMD ["serve", "--config", "/etc/xlaserve/xlaserve.yaml"]
