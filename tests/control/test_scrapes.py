"""The daemon's scrape with the proxy's metrics in it, by a real proxy and by one that is as the test says."""

from __future__ import annotations

import re
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.control import metrics
from hive.link import proxy_link
from hive.proxy import metrics as of_proxy
from tests.control.box import AWAKE, Box


async def scraped(box: Box) -> str:
    return (await box.services.scraper.scrape()).decode()


def up(text: str) -> dict[str, float]:
    [family] = [family for family in text_string_to_metric_families(text) if family.name == "hive_up"]
    return {sample.labels["part"]: sample.value for sample in family.samples}


async def test_it_has_the_proxys_own_metrics_and_no_family_twice(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(AWAKE)
    await box.start_real_proxy()
    text = await scraped(box)
    families = re.findall(r"^# HELP (\w+) ", text, re.MULTILINE)
    assert len(families) == len(set(families))
    assert {row.full_name for row in of_proxy.TABLE} <= {*families}
    assert up(text) == {"daemon": 1, "proxy": 1, "helper": 1, "redis": 0, "database": 1}
    told = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in told["hive_proxy_daemon_up"].samples] == [1]


async def test_a_proxy_that_stands_still_is_down_and_the_rest_is_told_without_waiting_for_more(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other patience with it is made longer than this test may take."""
    monkeypatch.setattr(metrics, "ANSWER_S", 600)
    monkeypatch.setattr(proxy_link, "ANSWER_S", 600)
    await box.start_helper()
    await box.start_daemon(AWAKE)
    await box.start_real_proxy()
    assert box._proxy_process is not None
    box._proxy_process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            text = await scraped(box)
            assert up(text) == {"daemon": 1, "proxy": 0, "helper": 1, "redis": 0, "database": 1}
            assert "hive_proxy_" not in text
            assert "hive_agents{" in text
    finally:
        box._proxy_process.send_signal(signal.SIGCONT)
    text = await scraped(box)
    assert up(text)["proxy"] == 1
    assert "hive_proxy_daemon_up 1.0" in text


async def test_what_the_proxy_wrote_stands_between_the_daemons_and_the_runners_names(box: Box) -> None:
    await box.everything()
    box.proxy.metrics = b"# HELP hive_proxy_x X.\n# TYPE hive_proxy_x gauge\nhive_proxy_x 7.0\n"
    text = await scraped(box)
    assert box.proxy.metrics.decode() in text
    assert text.index("# HELP hive_up ") < text.index("hive_proxy_x 7.0") < text.index("# HELP vllm_")


async def test_a_proxy_that_cannot_tell_its_metrics_is_down(box: Box) -> None:
    """It may answer everything else."""
    await box.everything()
    box.proxy.metrics = None
    assert up(await scraped(box))["proxy"] == 0
