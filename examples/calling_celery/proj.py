"""A Celery project such as you may have: a broker, results by `rpc://`, some tasks. It knows nothing of Coatcheck.

celery --app examples.calling_celery.proj worker
"""

import time

from celery import Celery

app = Celery("proj", backend="rpc://")  # the broker is CELERY_BROKER_URL, else RabbitMQ on localhost


@app.task(name="proj.add")
def add(x: float, y: float) -> float:
    return x + y


@app.task(name="proj.divide")
def divide(x: float, y: float) -> float:
    return x / y


@app.task(name="proj.add_slowly")
def add_slowly(x: float, y: float) -> float:
    print("adding slowly")
    time.sleep(1)
    return x + y
