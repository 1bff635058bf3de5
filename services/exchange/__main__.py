from common.lifecycle import run_actor
from services.exchange.service import main

if __name__ == "__main__":
    run_actor("exchange", main)
