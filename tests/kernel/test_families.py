"""Every causal language model of transformers, patched, against its own smoothed run."""

import pytest

pytest.importorskip("transformers")
import families
import transformers


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "MiniCPM3ForCausalLM", "OPTForCausalLM"])
def test_a_class_is_right(name):
    if not hasattr(transformers, name):
        pytest.skip("an older transformers")
    verdict = families.verdict(name)
    assert verdict.accepted and not verdict.wrong, verdict


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_class_is_wrong_and_few_are_refused():
    verdicts = [families.verdict(name) for name in families.class_names()]
    assert not [verdict for verdict in verdicts if verdict.wrong]
    refused = {verdict.name for verdict in verdicts if verdict.refused}
    # ProphetNet makes its loss of log probabilities; Dory's head is no linear map.
    assert refused <= {"ProphetNetForCausalLM", "DoryForCausalLM"}
    accepted = [verdict for verdict in verdicts if verdict.accepted]
    assert len(accepted) > 0.85 * len(verdicts)
