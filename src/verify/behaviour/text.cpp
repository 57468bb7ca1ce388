#include "verify/behaviour/text.h"

namespace w4q::verify::behaviour {

std::string_view plain_text() {
  return "The city lies on both banks of the river, about forty miles from the sea. It was founded in the twelfth "
         "century, when a small castle was built on the hill to protect the bridge. In the years that followed, the "
         "town grew into an important centre of trade. The first church was made of wood, and it was destroyed by "
         "fire. A new one was built of stone, and it still stands in the middle of the old market.\n\n\"I do not know "
         "what you want,\" she said, and looked at him for a long time. \"You came here last night and asked me for "
         "money. I told you that I had none.\" He did not answer her. He went to the window and looked out at the "
         "garden, where the children were playing under the trees. \"There was a time when you would have helped "
         "me,\" he said at last.\n\nDuring the war most of the houses near the station were destroyed, and many "
         "people left their homes and did not come back. After the war the government decided to build a large school "
         "and a hospital. The number of people who live there has increased since then, and today it is the second "
         "largest city in the country.";
}

}  // namespace w4q::verify::behaviour
