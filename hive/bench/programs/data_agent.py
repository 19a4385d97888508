"""An agent with numpy, pandas and `openai`: a data frame of 7.4 MiB, a turn looks at it and is two streamed calls."""

import numpy
import openai_agent
import pandas
import serving

ROWS = 194_000
frame = pandas.DataFrame(
    {name: numpy.random.default_rng().random(ROWS) for name in ("day", "frames", "honey", "wax", "mites")}
)


def turn(messages: serving.Messages) -> str:
    sums = frame.groupby((frame["day"] * 12).astype(int))["honey"].sum()
    messages[0]["content"] += " Honey by month: " + ", ".join(f"{found:.1f}" for found in sums)
    return str(openai_agent.turn(messages))


if __name__ == "__main__":
    serving.serve(turn, openai_agent.connect, openai_agent.openai)
